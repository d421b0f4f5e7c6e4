#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// What the autograd kernels of the ops share.
namespace cuseq {

bool any_requires_grad(at::TensorList tensors);

// Raises where forward-mode derivatives are asked for.
void refuse_forward_mode(at::TensorList tensors, const char* name);

// Saved tensors are undefined where an optional one was not given.
inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

inline std::optional<at::Tensor> or_nullopt(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace cuseq
