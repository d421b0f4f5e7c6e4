#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

// Integer tensors from values, and values from tensors.
namespace cuseq_tests {

inline at::Tensor ints(std::vector<int64_t> values, at::ScalarType dtype = at::kLong) {
  return at::tensor(values, at::kLong).to(dtype);
}

inline std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).reshape(-1).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

using Values = std::vector<int64_t>;

}  // namespace cuseq_tests
