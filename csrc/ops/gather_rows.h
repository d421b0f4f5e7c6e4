#pragma once

#include <cstdint>

#include "ops/kernel.h"

// What the kernels of gather_rows see.
namespace cuseq {

constexpr int kMaxGathered = 16;     // tensors of one launch
constexpr int kMaxGatheredDims = 8;  // trailing dimensions that do not collapse

// A tensor whose slots are rows of the output. Strides are bytes.
struct GatheredTensor {
  const void* in = nullptr;
  void* out = nullptr;      // [rows, row_bytes]
  int32_t columns = 1;      // of the last leading dimension
  int32_t row_bytes = 0;    // of a slot, as the output has it
  int32_t chunk_bytes = 0;  // of them, as many as lie side by side in the input
  int32_t n_dims = 0;       // around the chunk, innermost first
  int64_t slot_strides[2] = {};
  int32_t sizes[kMaxGatheredDims] = {};
  int64_t strides[kMaxGatheredDims] = {};
  alignas(16) unsigned char fill[16] = {};  // elements, as often as they fit
};

struct GatherRowsArgs {
  GatheredTensor tensors[kMaxGathered];
  int n_tensors = 0;
  const int32_t* index = nullptr;  // [rows], the slot of each; fill where there is no such slot
  int64_t rows = 0;
  int64_t slots = 0;
};

namespace cpu {
void gather_rows(const GatherRowsArgs& args);
}  // namespace cpu

namespace cuda {
void gather_rows(const GatherRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
