#include "ops/autograd.h"
#include "ops/types.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace cuseq {

std::vector<Tensor> defined(at::ArrayRef<OptionalTensor> tensors) {
  std::vector<Tensor> found;
  for (const OptionalTensor& tensor : tensors) {
    if (tensor.has_value()) found.push_back(*tensor);
  }
  return found;
}

bool any_requires_grad(TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::ranges::any_of(tensors, [](const Tensor& tensor) { return tensor.requires_grad(); });
}

void refuse_forward_mode(TensorList tensors, const char* name) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor._fw_grad(/*level=*/0).defined(), name,
        " has no forward-mode derivative: use reverse mode, or eager PyTorch where you need jvp");
  }
}

}  // namespace cuseq
