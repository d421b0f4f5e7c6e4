#include <ATen/DeviceGuard.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attention/capture_room.h"
#include "attention/inputs.h"
#include "attention/options.h"
#include "cuseq/attention.h"
#include "ops/checks.h"

// The ops cuseq::varlen_attention and cuseq::varlen_attention_backward. The autograd, autocast and
// device kernels of an op are registered under its one name and redispatch to it.
namespace cuseq::attention {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// out, logsumexp and the far rows of a rank's part
using Outputs = std::tuple<Tensor, Tensor, Tensor>;

const auto& forward_op() {
  static const auto op = find_op<Signature<Outputs, const Tensor&, const Tensor&, const Tensor&>>(
      "cuseq::varlen_attention");
  return op;
}

const auto& backward_op() {
  static const auto op =
      find_op<Signature<Gradients, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const Tensor&, const OptionalTensor&>>(
          "cuseq::varlen_attention_backward");
  return op;
}

Outputs forward_kernel(const AttentionOptions& options, const Tensor& q, const Tensor& k,
                       const Tensor& v) {
  const at::OptionalDeviceGuard guard(at::device_of(q));
  Row row = row_of(q, k, v, options);
  if (!row.call.queries.num_real_tokens.has_value() && is_capturing(q)) {
    warn_of_needless_room(options.cu_seqlens, options.host_meta, q.size(0));
  }
  if (row.share.has_value()) row.far_rows = at::zeros(far_rows_sizes(row.call), k.options());
  auto [out, logsumexp] = attend(row);
  return {out, logsumexp, or_undefined(row.far_rows)};
}

Gradients backward_kernel(const AttentionOptions& options, const Tensor& grad_out, const Tensor& q,
                          const Tensor& k, const Tensor& v, const Tensor& out,
                          const Tensor& logsumexp, const OptionalTensor& far_rows) {
  const at::OptionalDeviceGuard guard(at::device_of(q));
  Row row = row_of(q, k, v, options);
  check_far_rows(far_rows, row);
  row.far_rows = far_rows;
  return attend_backward(row, outer_of(grad_out, out, logsumexp, q, v));
}

class VarlenAttention : public torch::autograd::Function<VarlenAttention> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, const AttentionOptions& options,
                               Outputs* returned) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Outputs outputs = call_op(forward_op(), options, q, k, v);
    const auto& [out, logsumexp, far_rows] = outputs;
    save_options(ctx, options, {q, k, v, out, logsumexp, far_rows});
    ctx->set_materialize_grads(false);
    // The others are returned outside of autograd: compiled autograd accepts no output marked as
    // not differentiable.
    *returned = outputs;
    return {out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const AttentionOptions options = saved_options(ctx, saved, 6);
    Tensor grad_out = grads[0];
    if (!grad_out.defined()) {
      if (!options.rank_meta.has_value()) return variable_list(5);
      grad_out = at::zeros_like(saved[3]);  // other ranks wait for this one
    }
    auto [grad_q, grad_k, grad_v] = call_op(backward_op(), options, grad_out, saved[0], saved[1],
                                            saved[2], saved[3], saved[4], or_nullopt(saved[5]));
    return {grad_q, grad_k, grad_v, {}, {}};
  }
};

// The second derivative is not implemented. Asking for it raises instead of returning zero.
class VarlenAttentionBackward : public torch::autograd::Function<VarlenAttentionBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const Tensor& grad_out, const Tensor& q,
                               const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& logsumexp, const OptionalTensor& far_rows,
                               const AttentionOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [grad_q, grad_k, grad_v] =
        call_op(backward_op(), options, grad_out, q, k, v, out, logsumexp, far_rows);
    return {grad_q, grad_k, grad_v};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cuseq::varlen_attention cannot be differentiated twice: its kernels have no second "
        "derivative; use eager attention where you need create_graph=True");
  }
};

Outputs forward_autograd(const AttentionOptions& options, const Tensor& q, const Tensor& k,
                         const Tensor& v) {
  refuse_forward_mode({q, k, v}, "cuseq::varlen_attention");
  if (!any_requires_grad({q, k, v})) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_op(forward_op(), options, q, k, v);
  }
  Outputs outputs;
  std::get<0>(outputs) = VarlenAttention::apply(q, k, v, options, &outputs)[0];
  return outputs;
}

Gradients backward_autograd(const AttentionOptions& options, const Tensor& grad_out,
                            const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                            const Tensor& logsumexp, const OptionalTensor& far_rows) {
  refuse_forward_mode({grad_out, q, k, v, out}, "cuseq::varlen_attention");
  if (!any_requires_grad({grad_out, q, k, v, out})) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_op(backward_op(), options, grad_out, q, k, v, out, logsumexp, far_rows);
  }
  const auto grads =
      VarlenAttentionBackward::apply(grad_out, q, k, v, out, logsumexp, far_rows, options);
  return {grads[0], grads[1], grads[2]};
}

// Cast q, k and v to the autocast dtype of the region, as scaled_dot_product_attention does.
template <c10::DeviceType device>
Outputs forward_autocast(const AttentionOptions& options, const Tensor& q, const Tensor& k,
                         const Tensor& v) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  return call_op(forward_op(), options, cast(q), cast(k), cast(v));
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("varlen_attention", TORCH_FN(Kernel<forward_kernel>::call));
  m.impl("varlen_attention_backward", TORCH_FN(Kernel<backward_kernel>::call));
}

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("varlen_attention", TORCH_FN(Kernel<forward_autograd>::call));
  m.impl("varlen_attention_backward", TORCH_FN(Kernel<backward_autograd>::call));
}

TORCH_LIBRARY_IMPL(cuseq, AutocastCPU, m) {
  m.impl("varlen_attention", TORCH_FN(Kernel<forward_autocast<at::kCPU>>::call));
}

TORCH_LIBRARY_IMPL(cuseq, AutocastCUDA, m) {
  m.impl("varlen_attention", TORCH_FN(Kernel<forward_autocast<at::kCUDA>>::call));
}

}  // namespace cuseq::attention

namespace cuseq {

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const AttentionOptions& options) {
  auto [out, logsumexp, far_rows] = attention::call_op(attention::forward_op(), options, q, k, v);
  return {out, logsumexp};
}

}  // namespace cuseq
