#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/kernel.h"

namespace cuseq {

// Between a row whose segments have padding and the same sequences without it.
struct SegmentRowsArgs {
  Segments segments;
  int32_t* places = nullptr;  // [total_tokens], where each real token lies; -1 behind the last
  int32_t* ranks = nullptr;   // [total_tokens], which of the real tokens each is; -1 on padding
};

namespace cpu {
void segment_rows(const SegmentRowsArgs& args);
}  // namespace cpu

namespace cuda {
void segment_rows(const SegmentRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
