#pragma once

#include <cstdint>

#include "ops/kernel.h"
#include "ops/lengths_from_padding_mask.h"

namespace cuseq {

// Arguments to map between the slots of a padded batch and the tokens of the packed row. The same
// pass computes the metadata of each token.
struct MaskRowsArgs {
  PaddingMaskArgs mask;                 // `lengths` is not written
  const int32_t* cu_seqlens = nullptr;  // [rows + 1], offsets of the segments
  int64_t total_tokens = 0;
  // [total_tokens], slot of each token: row * cols + col; -1 on padding and tail
  int32_t* slots = nullptr;
  int32_t* tokens = nullptr;        // [rows, cols], token of each slot; -1 if none
  int32_t* position_ids = nullptr;  // [total_tokens], position in the segment; the tail restarts
  int32_t* seq_ids = nullptr;       // [total_tokens]; `rows` on the tail
  bool* is_pad = nullptr;           // [total_tokens]
};

namespace cpu {
void mask_rows(const MaskRowsArgs& args);
}  // namespace cpu

namespace cuda {
void mask_rows(const MaskRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
