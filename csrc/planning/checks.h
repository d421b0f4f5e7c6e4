#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "ops/types.h"
#include "packing/bin_pack.h"

// Checks and conversions shared by the functions of planning.h.
namespace cuseq {

inline void check_host_vector(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), name, " must lie on the CPU, got ", tensor.device());
  check_memory(tensor, name);
  check_vector(tensor, name);
}

inline void check_capacity(int64_t capacity) {
  TORCH_CHECK_VALUE(capacity >= 1, "capacity must be at least 1, got ", capacity);
}

// Check that `samples` is int32 on the CPU with values in [0, set_size).
inline void check_samples(const Tensor& samples, int64_t set_size, const char* name) {
  check_host_vector(samples, name);
  TORCH_CHECK_TYPE(samples.scalar_type() == at::kInt, name, " must be int32, got ",
                   dtype_name(samples.scalar_type()));
  const auto values = samples.accessor<const int32_t, 1>();
  for (int64_t i = 0; i < samples.numel(); ++i) {
    TORCH_CHECK_VALUE(0 <= values[i] && values[i] < set_size, name, " must lie in [0, ", set_size,
                      "), got ", name, "[", i, "] = ", values[i]);
  }
}

// Return the strategy of that name. "wrapped" requires `may_cut`, because it cuts samples.
inline packing::Strategy strategy_named(std::string_view name, bool may_cut) {
  if (name == "bfd") return packing::Strategy::kBestFit;
  if (name == "ffd") return packing::Strategy::kFirstFit;
  if (name == "sequential") return packing::Strategy::kSequential;
  TORCH_CHECK_VALUE(may_cut && name == "wrapped", "strategy must be \"bfd\", \"ffd\"",
                    may_cut ? ", \"sequential\" or \"wrapped\"" : " or \"sequential\"", ", got \"",
                    name, "\"");
  return packing::Strategy::kWrapped;
}

// Return a tensor that takes ownership of the vector without a copy.
template <typename T>
Tensor tensor_of(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  return at::from_blob(
      owned->data(), {static_cast<int64_t>(owned->size())}, [owned](void*) { delete owned; },
      at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
}

}  // namespace cuseq
