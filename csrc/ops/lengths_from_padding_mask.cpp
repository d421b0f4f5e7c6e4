#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/register.h"

namespace cuseq {
namespace {

void check_mask(const at::Tensor& mask) {
  TORCH_CHECK_VALUE(mask.dim() == 2, "mask must have shape [batch, seqlen], got ", mask.sizes());
  TORCH_CHECK_TYPE(at::isIntegralType(mask.scalar_type(), /*includeBool=*/true),
                   "mask must be bool or an integer type, true where a token is real, got ",
                   mask.scalar_type());
}

at::Tensor lengths_from_padding_mask_kernel(const at::Tensor& mask) {
  check_mask(mask);
  check_tokens(mask.numel());
  at::Tensor out = at::empty({mask.size(0)}, int32_on(mask));
  PaddingMaskArgs args;
  args.mask = mask.const_data_ptr();
  args.element_size = static_cast<int64_t>(mask.element_size());
  args.rows = mask.size(0);
  args.cols = mask.size(1);
  args.row_stride = mask.stride(0);
  args.col_stride = mask.stride(1);
  args.lengths = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(lengths_from_padding_mask, mask, args);
  return out;
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("lengths_from_padding_mask", TORCH_FN(lengths_from_padding_mask_kernel));
}

}  // namespace cuseq
