#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/kernel.h"

namespace cuseq {

// Arguments to map between a row with padded segments and the same sequences without padding.
struct SegmentRowsArgs {
  Segments segments;
  int32_t* places = nullptr;  // [total_tokens], place of each real token; -1 after the last
  int32_t* ranks = nullptr;   // [total_tokens], rank among the real tokens; -1 on padding
};

namespace cpu {
void segment_rows(const SegmentRowsArgs& args);
}  // namespace cpu

namespace cuda {
void segment_rows(const SegmentRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
