#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/float_type.h"
#include "ops/kernel.h"

namespace cuseq {

// Arguments of a sum of rows, in fp32 (fp64 for fp64) and in the order of the terms, so that the
// result does not depend on the schedule of threads.
//
//   out[i] = sum of row(terms[j]) for j in [offsets[i], offsets[i + 1])
//   row(t) = first[t] if t < num_first, else second[t - num_first]
//
// Worked example: num_first = 2, offsets [0, 1, 3], terms [1, 0, 2]:
//   out[0] = first[1], out[1] = first[0] + second[0]
struct SumRowsArgs {
  const void* first = nullptr;   // [num_first, elements], contiguous
  const void* second = nullptr;  // [num_second, elements], contiguous
  int64_t num_first = 0;
  int64_t num_second = 0;
  const int32_t* offsets = nullptr;  // [num_rows + 1]
  const int32_t* terms = nullptr;    // [num_terms]
  int64_t num_terms = 0;
  void* out = nullptr;  // [num_rows, elements], contiguous
  int64_t num_rows = 0;
  int64_t elements = 0;
  FloatType type = FloatType::kFloat32;
};

// The terms [begin, end) of a row, inside the tensor whatever the offsets hold.
struct Terms {
  int64_t begin;
  int64_t end;

  CUSEQ_HOST_DEVICE static Terms of(const SumRowsArgs& args, int64_t row) {
    const int64_t begin = args.offsets[row];
    const int64_t end = args.offsets[row + 1];
    return {begin < 0 ? 0 : begin, end > args.num_terms ? args.num_terms : end};
  }
};

// Return the row of a term, or null if there is no such row.
template <typename T>
CUSEQ_HOST_DEVICE const T* row_of_term(const SumRowsArgs& args, int64_t term) {
  if (term < 0 || term >= args.num_first + args.num_second) return nullptr;
  return term < args.num_first
             ? static_cast<const T*>(args.first) + term * args.elements
             : static_cast<const T*>(args.second) + (term - args.num_first) * args.elements;
}

namespace cpu {
void sum_rows(const SumRowsArgs& args);
}  // namespace cpu

namespace cuda {
void sum_rows(const SumRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
