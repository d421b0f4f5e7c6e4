#include "ops/segment_reduce.h"

#include <ATen/ops/empty.h>

#include <string_view>

#include "layout/host_meta.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/types.h"

namespace cuseq {
namespace {

Reduction reduction_named(std::string_view name) {
  if (name == "sum") return Reduction::kSum;
  if (name == "mean") return Reduction::kMean;
  if (name == "max") return Reduction::kMax;
  TORCH_CHECK_VALUE(name == "last", "kind must be \"sum\", \"mean\", \"max\" or \"last\", got \"",
                    name, "\"");
  return Reduction::kLast;
}

at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

void check_rows(const Tensor& rows, const char* name, const Tensor& cu_seqlens) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.is_contiguous(), name,
                    " must be contiguous with two dimensions, got shape ", rows.sizes());
  TORCH_CHECK_VALUE(rows.device() == cu_seqlens.device(), name, " must lie where packed does, on ",
                    cu_seqlens.device(), ", got ", rows.device());
  constexpr int64_t kMostColumns = int64_t{1} << 20;
  TORCH_CHECK_VALUE(rows.size(1) <= kMostColumns, name, " must have at most 2^20 columns, got ",
                    rows.size(1));
}

SegmentReduceArgs arguments(Tensor cu_seqlens, std::string_view kind, OptionalTensor padded,
                            int64_t total_tokens, int64_t columns, OptionalInt num_seqs) {
  check_offsets(cu_seqlens);
  check_tokens(total_tokens);
  if (num_seqs.has_value() && *num_seqs + 1 < cu_seqlens.size(0)) {
    cu_seqlens = cu_seqlens.narrow(0, 0, *num_seqs + 1);
    if (padded.has_value()) {
      check_offsets(*padded);
      TORCH_CHECK_VALUE(padded->size(0) > *num_seqs, "cu_seqlens_padded must have at least ",
                        *num_seqs + 1, " entries, got ", padded->size(0));
      padded = padded->narrow(0, 0, *num_seqs + 1);
    }
  }
  check_offset_values(cu_seqlens, total_tokens);
  check_padded_offsets(padded, cu_seqlens, total_tokens);
  SegmentReduceArgs args;
  args.segments = segments_of(cu_seqlens, padded, total_tokens);
  args.columns = columns;
  args.kind = reduction_named(kind);
  return args;
}

// Return the number of sequences of a layout; waits for the copy of lengths that came from a GPU.
OptionalInt num_seqs_of(const OptionalTensor& host_meta, const Tensor& cu_seqlens,
                        int64_t total_tokens) {
  if (!host_meta.has_value()) return std::nullopt;
  TORCH_CHECK(!is_capturing(cu_seqlens),
              "the number of sequences would be a constant of the CUDA graph, which replays other "
              "lengths: reduce by sequence outside the graph, or outside compiled code if the "
              "layout stays the same");
  const HostMeta meta = HostMeta::of(*host_meta);
  TORCH_CHECK_VALUE(meta.total_tokens == total_tokens,
                    "values must have packed.total_tokens = ", meta.total_tokens, " rows, got ",
                    total_tokens);
  meta.check_offsets(cu_seqlens);
  return meta.num_seqs;
}

std::tuple<Tensor, Tensor> segment_reduce_kernel(const Tensor& values, const Tensor& cu_seqlens,
                                                 c10::string_view kind,
                                                 const OptionalTensor& padded,
                                                 const OptionalTensor& host_meta) {
  check_rows(values, "values", cu_seqlens);
  SegmentReduceArgs args =
      arguments(cu_seqlens, {kind.data(), kind.size()}, padded, values.size(0), values.size(1),
                num_seqs_of(host_meta, cu_seqlens, values.size(0)));
  args.type = float_type(values, "values");
  const int64_t segments = args.segments.seqlens.n_seqs;
  Tensor out =
      at::empty({segments, values.size(1)}, values.options().dtype(wide(values.scalar_type())));
  const int64_t maxima = args.kind == Reduction::kMax ? values.size(1) : 0;
  Tensor which = at::empty({segments, maxima}, cu_seqlens.options());
  args.values = values.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.which = which.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(segment_reduce, values, args);
  return {out, which};
}

Tensor segment_reduce_backward_kernel(const Tensor& grad_out, const Tensor& which,
                                      at::ScalarType dtype, int64_t total_tokens,
                                      const Tensor& cu_seqlens, c10::string_view kind,
                                      const OptionalTensor& padded) {
  check_rows(grad_out, "grad_out", cu_seqlens);
  const int64_t columns = grad_out.size(1);
  SegmentReduceArgs args = arguments(cu_seqlens, {kind.data(), kind.size()}, padded, total_tokens,
                                     columns, grad_out.size(0));
  const int64_t segments = args.segments.seqlens.n_seqs;
  TORCH_CHECK_VALUE(grad_out.size(0) == segments, "grad_out must have a row for each of the ",
                    segments, " sequences, got ", grad_out.size(0));
  TORCH_CHECK_TYPE(grad_out.scalar_type() == wide(dtype), "grad_out must be ",
                   dtype_name(wide(dtype)), ", got ", dtype_name(grad_out.scalar_type()));
  check_rows(which, "which", cu_seqlens);
  TORCH_CHECK_TYPE(which.scalar_type() == at::kInt, "which must be int32, got ",
                   dtype_name(which.scalar_type()));
  const int64_t maxima = args.kind == Reduction::kMax ? columns : 0;
  TORCH_CHECK_VALUE(which.size(0) == segments && which.size(1) == maxima,
                    "which must be what segment_reduce returned, [", segments, ", ", maxima,
                    "], got ", which.sizes());
  Tensor grad = at::empty({total_tokens, columns}, grad_out.options().dtype(dtype));
  args.type = float_type(grad, "dtype");
  args.out = const_cast<void*>(grad_out.const_data_ptr());
  args.which = const_cast<int32_t*>(which.const_data_ptr<int32_t>());
  args.grad_values = grad.mutable_data_ptr();
  CUSEQ_RUN(segment_reduce_backward, grad_out, args);
  return grad;
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("segment_reduce", TORCH_FN(segment_reduce_kernel));
  m.impl("segment_reduce_backward", TORCH_FN(segment_reduce_backward_kernel));
}

}  // namespace cuseq
