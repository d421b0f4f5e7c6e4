#pragma once

#include <cstdint>

#include "ops/kernel.h"

// Arguments of the gather_rows kernels.
namespace cuseq {

constexpr int kMaxGathered = 16;     // tensors per launch
constexpr int kMaxGatheredDims = 8;  // trailing dimensions that do not collapse

// A tensor whose slots are gathered into rows of an output. Strides are in bytes.
struct GatheredTensor {
  const void* in = nullptr;
  void* out = nullptr;      // [rows, row_bytes]
  int32_t columns = 1;      // size of the last leading dimension
  int32_t row_bytes = 0;    // size of a slot; contiguous in the output
  int32_t chunk_bytes = 0;  // bytes of a slot that are contiguous in the input
  int32_t n_dims = 0;       // number of dimensions around the chunk, innermost first
  int64_t slot_strides[2] = {};
  int32_t sizes[kMaxGatheredDims] = {};
  int64_t strides[kMaxGatheredDims] = {};
  alignas(16) unsigned char fill[16] = {};  // the fill element, repeated
};

struct GatherRowsArgs {
  GatheredTensor tensors[kMaxGathered];
  int n_tensors = 0;
  const int32_t* index = nullptr;  // [rows], slot of each row; if out of range, `fill`
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
