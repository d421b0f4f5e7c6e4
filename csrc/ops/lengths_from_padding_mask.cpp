#include <ATen/ops/empty.h>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/lengths_from_padding_mask.h"
#include "ops/types.h"

namespace cuseq {
namespace {

MaskKind kind_of(const Tensor& mask, std::string_view kind) {
  if (kind == "additive") {
    TORCH_CHECK_TYPE(at::isFloatingType(mask.scalar_type()),
                     "mask must be floating point where its kind is 'additive', got ",
                     dtype_name(mask.scalar_type()));
    return MaskKind::kNegativeIsHidden;
  }
  TORCH_CHECK_VALUE(kind == "nonzero" || kind == "zero",
                    "kind must be 'nonzero', 'zero' or 'additive', got '", kind, "'");
  TORCH_CHECK_TYPE(at::isIntegralType(mask.scalar_type(), /*includeBool=*/true),
                   "mask must be bool or an integer type, or of kind 'additive', got ",
                   dtype_name(mask.scalar_type()));
  return kind == "zero" ? MaskKind::kZeroIsReal : MaskKind::kNonZeroIsReal;
}

Tensor lengths_from_padding_mask_kernel(const Tensor& mask, c10::string_view kind) {
  PaddingMaskArgs args = padding_mask_args(mask, kind);
  Tensor out = at::empty({mask.size(0)}, int32_on(mask));
  args.lengths = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(lengths_from_padding_mask, mask, args);
  return out;
}

}  // namespace

PaddingMaskArgs padding_mask_args(const Tensor& mask, std::string_view kind) {
  TORCH_CHECK_VALUE(mask.dim() == 2, "mask must have shape [batch, seqlen], got ", mask.sizes());
  check_tokens(mask.numel());
  check_tokens(mask.size(0) + 1);  // one block per row
  PaddingMaskArgs args;
  args.kind = kind_of(mask, kind);
  args.mask = mask.const_data_ptr();
  args.element_size = static_cast<int64_t>(mask.element_size());
  args.rows = mask.size(0);
  args.cols = mask.size(1);
  args.row_stride = mask.stride(0);
  args.col_stride = mask.stride(1);
  return args;
}

CUSEQ_REGISTER(m) {
  m.impl("lengths_from_padding_mask", TORCH_FN(lengths_from_padding_mask_kernel));
}

}  // namespace cuseq
