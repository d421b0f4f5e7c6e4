#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/kernel.h"

namespace cuseq {

struct BoundaryLabelsArgs {
  const void* labels = nullptr;  // [total_tokens]
  void* out = nullptr;           // [total_tokens]
  bool is_int64 = true;
  Segments segments;
  int64_t shift = 0;         // number of tokens that the labels were shifted left by
  int64_t ignore_index = 0;  // what is written
};

namespace cpu {
void mask_boundary_labels(const BoundaryLabelsArgs& args);
}  // namespace cpu

namespace cuda {
void mask_boundary_labels(const BoundaryLabelsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
