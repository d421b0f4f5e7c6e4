#pragma once

#include <cstdint>

#include "cuseq/macros.h"
#include "ops/float_type.h"
#include "ops/kernel.h"

// Kernels that gather and sum rows of keys and values, which travel between ranks side by side.
// They are not ops of their own: csrc/attention/compositions/ runs them.
namespace cuseq {

// Rows [count] of keys and values: two tensors, or one that has them side by side. A row of either
// is contiguous; strides count elements. `Void` is void or const void.
template <typename Void>
struct KeyValueRows {
  Void* keys = nullptr;
  Void* values = nullptr;
  int64_t key_stride = 0;
  int64_t value_stride = 0;
  int64_t count = 0;
};

// The keys and the values of one row.
template <typename T>
struct KeyValueRow {
  T* keys;
  T* values;

  template <typename Void>
  CUSEQ_HOST_DEVICE static KeyValueRow of(const KeyValueRows<Void>& rows, int64_t row) {
    return {static_cast<T*>(rows.keys) + row * rows.key_stride,
            static_cast<T*>(rows.values) + row * rows.value_stride};
  }

  // Return the row's element i if the values follow `key_width` keys.
  CUSEQ_HOST_DEVICE T* at(int64_t i, int64_t key_width) const {
    return i < key_width ? keys + i : values + (i - key_width);
  }
};

// Sources of rows: those of `first`, then those of `second`. Source s is row s of `first` if
// s < first.count, else row s - first.count of `second`.
struct KeyValueSources {
  KeyValueRows<const void> first;
  KeyValueRows<const void> second;

  CUSEQ_HOST_DEVICE bool has(int64_t source) const {
    return source >= 0 && source < first.count + second.count;
  }
  template <typename T>
  CUSEQ_HOST_DEVICE KeyValueRow<const T> row(int64_t source) const {
    return source < first.count ? KeyValueRow<const T>::of(first, source)
                                : KeyValueRow<const T>::of(second, source - first.count);
  }
};

// Arguments of a gather: out[i] = row(index[i]), or zeros if there is no such source.
struct GatherKeyValuesArgs {
  KeyValueSources sources;
  const int32_t* index = nullptr;  // [out.count]
  KeyValueRows<void> out;
  int64_t key_width = 0;  // elements of a row
  int64_t value_width = 0;
  FloatType type = FloatType::kFloat32;
};

// Arguments of a sum, in fp32 (fp64 for fp64) and in the order of the terms, so that the result
// does not depend on the schedule of threads. Terms without a source add nothing; a row without
// terms stays as it is.
//
//   out[i] = sum of row(terms[j]) for j in [offsets[i], offsets[i + 1])
//
// Worked example: first has 2 rows, offsets [0, 1, 3], terms [1, 0, 2]:
//   out[0] = first[1], out[1] = first[0] + second[0]
struct SumKeyValuesArgs {
  KeyValueSources sources;
  const int32_t* offsets = nullptr;  // [out.count + 1]
  const int32_t* terms = nullptr;    // [num_terms]
  int64_t num_terms = 0;
  KeyValueRows<void> out;
  int64_t key_width = 0;
  int64_t value_width = 0;
  FloatType type = FloatType::kFloat32;
};

// The terms [begin, end) of a row, inside the tensor whatever the offsets hold.
struct Terms {
  int64_t begin;
  int64_t end;

  CUSEQ_HOST_DEVICE static Terms of(const SumKeyValuesArgs& args, int64_t row) {
    const int64_t begin = args.offsets[row];
    const int64_t end = args.offsets[row + 1];
    return {begin < 0 ? 0 : begin, end > args.num_terms ? args.num_terms : end};
  }

  CUSEQ_HOST_DEVICE bool empty() const { return begin >= end; }
};

namespace cpu {
void gather_key_values(const GatherKeyValuesArgs& args);
void sum_key_values(const SumKeyValuesArgs& args);
}  // namespace cpu

namespace cuda {
void gather_key_values(const GatherKeyValuesArgs& args, Stream stream);
void sum_key_values(const SumKeyValuesArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
