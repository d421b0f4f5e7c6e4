#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

// Helpers shared by the autograd kernels of the ops.
namespace cuseq {

// Return the tensors that are there.
std::vector<at::Tensor> defined(at::ArrayRef<std::optional<at::Tensor>> tensors);

bool any_requires_grad(at::TensorList tensors);

// Raise NotImplementedError if a tensor has a forward-mode derivative.
void refuse_forward_mode(at::TensorList tensors, const char* name);

// Autograd saves an absent optional tensor as an undefined one. These two functions convert.
inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

inline std::optional<at::Tensor> or_nullopt(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace cuseq
