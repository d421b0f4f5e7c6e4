#pragma once

#include <cstdint>

#include "ops/kernel.h"

namespace cuseq {

struct PositionIdsArgs {
  const void* position_ids = nullptr;  // [rows, cols]
  bool is_int64 = true;
  bool is_plane = false;  // one plane of multimodal positions
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 1;
  int64_t max_seqs = 0;
  int64_t tile_size = 0;           // tokens of one tile, CUDA only
  int32_t* tile_counts = nullptr;  // [number of tiles], scratch, CUDA only
  int32_t* cu_seqlens = nullptr;   // [max_seqs + 1], filled up with the last offset
  int32_t* num_seqs = nullptr;     // [1], the true count, even if it exceeds max_seqs
};

namespace cpu {
void cu_seqlens_from_position_ids(const PositionIdsArgs& args);
}  // namespace cpu

namespace cuda {
void cu_seqlens_from_position_ids(const PositionIdsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
