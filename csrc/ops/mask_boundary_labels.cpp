#include "ops/mask_boundary_labels.h"

#include <ATen/ops/empty_like.h>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/types.h"

namespace cuseq {
namespace {

Tensor mask_boundary_labels_kernel(const Tensor& labels, const Tensor& cu_seqlens, int64_t shift,
                                   int64_t ignore_index, const OptionalTensor& cu_seqlens_padded) {
  check_integer(labels, "labels");
  TORCH_CHECK_VALUE(labels.is_contiguous(), "labels must be contiguous, got strides ",
                    labels.strides(), " for shape ", labels.sizes());
  TORCH_CHECK_VALUE(
      labels.scalar_type() == at::kLong || ignore_index == static_cast<int32_t>(ignore_index),
      "ignore_index must fit in the labels' int32, got ", ignore_index);
  TORCH_CHECK_VALUE(shift >= 0, "shift must be at least 0, got ", shift);
  check_tokens(labels.numel());
  check_offsets(cu_seqlens);
  TORCH_CHECK_VALUE(labels.device() == cu_seqlens.device(),
                    "labels and cu_seqlens must lie on one device, got ", labels.device(), " and ",
                    cu_seqlens.device());
  check_offset_values(cu_seqlens, labels.numel());
  check_padded_offsets(cu_seqlens_padded, cu_seqlens, labels.numel());
  Tensor out = at::empty_like(labels);
  BoundaryLabelsArgs args;
  args.labels = labels.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.is_int64 = labels.scalar_type() == at::kLong;
  args.segments = segments_of(cu_seqlens, cu_seqlens_padded, labels.numel());
  args.shift = shift;
  args.ignore_index = ignore_index;
  CUSEQ_RUN(mask_boundary_labels, labels, args);
  return out;
}

}  // namespace

CUSEQ_REGISTER(m) { m.impl("mask_boundary_labels", TORCH_FN(mask_boundary_labels_kernel)); }

}  // namespace cuseq
