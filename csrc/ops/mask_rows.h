#pragma once

#include <cstdint>

#include "ops/kernel.h"
#include "ops/lengths_from_padding_mask.h"

namespace cuseq {

// Where each slot of a padded batch lies in the packed row, the other way round, and what there is
// to say about each token on the way.
struct MaskRowsArgs {
  PaddingMaskArgs mask;                 // its lengths are not written
  const int32_t* cu_seqlens = nullptr;  // [rows + 1], of the segments
  int64_t total_tokens = 0;
  int32_t* slots = nullptr;   // [total_tokens], row * cols + col of each token, -1 on pads and tail
  int32_t* tokens = nullptr;  // [rows, cols], token of each slot, -1 where there is none
  int32_t* position_ids = nullptr;  // [total_tokens], in the segment; the tail restarts
  int32_t* seq_ids = nullptr;       // [total_tokens], rows on the tail
  bool* is_pad = nullptr;           // [total_tokens]
};

namespace cpu {
void mask_rows(const MaskRowsArgs& args);
}  // namespace cpu

namespace cuda {
void mask_rows(const MaskRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
