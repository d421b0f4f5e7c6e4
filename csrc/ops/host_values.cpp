#include "ops/host_values.h"

#include <c10/util/Exception.h>

namespace cuseq {

void check_memory(const at::Tensor& tensor, const char* name) {
  const bool has_values =
      tensor.has_storage() && (tensor.numel() == 0 || tensor.storage().data() != nullptr);
  TORCH_CHECK_VALUE(has_values, name, " must have values in memory, got a tensor without");
}

at::Tensor host_values(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  return tensor.resolve_neg().to(options).contiguous();
}

}  // namespace cuseq
