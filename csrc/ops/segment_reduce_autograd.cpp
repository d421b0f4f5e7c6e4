#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "ops/autograd.h"
#include "ops/dispatch.h"
#include "ops/types.h"

// Autograd of cuseq::segment_reduce; its kernels are in segment_reduce.cpp.
namespace cuseq::autograd::segment_reduce {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::string_view,
                                           const OptionalTensor&, const OptionalTensor&);
using Backward = Tensor(const Tensor&, const Tensor&, at::ScalarType, c10::SymInt, const Tensor&,
                        c10::string_view, const OptionalTensor&);

std::tuple<Tensor, Tensor> call_forward(const Tensor& values, const Tensor& cu_seqlens,
                                        c10::string_view kind, const OptionalTensor& padded,
                                        const OptionalTensor& host_meta) {
  static const auto op = find_op<Forward>("cuseq::segment_reduce");
  return op.call(values, cu_seqlens, kind, padded, host_meta);
}

Tensor call_backward(const Tensor& grad_out, const Tensor& which, at::ScalarType dtype,
                     c10::SymInt total_tokens, const Tensor& cu_seqlens, c10::string_view kind,
                     const OptionalTensor& padded) {
  static const auto op = find_op<Backward>("cuseq::segment_reduce_backward");
  return op.call(grad_out, which, dtype, std::move(total_tokens), cu_seqlens, kind, padded);
}

class SegmentReduce : public torch::autograd::Function<SegmentReduce> {
 public:
  static constexpr bool is_traceable = true;

  // The tokens of maxima are returned outside of autograd: compiled autograd accepts no output
  // marked as not differentiable.
  static Tensor forward(AutogradContext* ctx, const Tensor& values, const Tensor& cu_seqlens,
                        const std::string& kind, const OptionalTensor& padded,
                        const OptionalTensor& host_meta, Tensor* which) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, tokens] = call_forward(values, cu_seqlens, kind, padded, host_meta);
    ctx->save_for_backward({cu_seqlens, or_undefined(padded), tokens});
    ctx->saved_data["kind"] = kind;
    ctx->saved_data["dtype"] = values.scalar_type();
    ctx->saved_data["tokens"] = values.sym_size(0);
    ctx->set_materialize_grads(false);
    *which = tokens;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(6);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    result[0] =
        call_backward(grads[0].contiguous(), saved[2], ctx->saved_data["dtype"].toScalarType(),
                      ctx->saved_data["tokens"].toSymInt(), saved[0],
                      ctx->saved_data["kind"].toStringRef(), or_nullopt(saved[1]));
    return result;
  }
};

// The second derivative is not implemented. Asking for it raises instead of returning zero.
class SegmentReduceBackward : public torch::autograd::Function<SegmentReduceBackward> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext*, const Tensor& grad_out, const Tensor& which,
                        at::ScalarType dtype, const c10::SymInt& total_tokens,
                        const Tensor& cu_seqlens, const std::string& kind,
                        const OptionalTensor& padded) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_out, which, dtype, total_tokens, cu_seqlens, kind, padded);
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cuseq::segment_reduce can be differentiated once: use index_add in eager PyTorch where "
        "you need the gradient of a gradient");
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& values, const Tensor& cu_seqlens,
                                            c10::string_view kind, const OptionalTensor& padded,
                                            const OptionalTensor& host_meta) {
  refuse_forward_mode(values, "cuseq::segment_reduce");
  if (!any_requires_grad(values)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_forward(values, cu_seqlens, kind, padded, host_meta);
  }
  Tensor which;
  const Tensor out =
      SegmentReduce::apply(values, cu_seqlens, std::string(kind), padded, host_meta, &which);
  return {out, which};
}

Tensor backward_autograd(const Tensor& grad_out, const Tensor& which, at::ScalarType dtype,
                         c10::SymInt total_tokens, const Tensor& cu_seqlens, c10::string_view kind,
                         const OptionalTensor& padded) {
  refuse_forward_mode(grad_out, "cuseq::segment_reduce_backward");
  if (!any_requires_grad(grad_out)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_out, which, dtype, std::move(total_tokens), cu_seqlens, kind, padded);
  }
  return SegmentReduceBackward::apply(grad_out, which, dtype, total_tokens, cu_seqlens,
                                      std::string(kind), padded);
}

}  // namespace

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("segment_reduce", TORCH_FN(forward_autograd));
  m.impl("segment_reduce_backward", TORCH_FN(backward_autograd));
}

}  // namespace cuseq::autograd::segment_reduce
