#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "cuseq/ops.h"
#include "ops/autograd.h"
#include "ops/dispatch.h"
#include "ops/types.h"

// Autograd and autocast of cuseq::causal_conv1d; its kernels are in causal_conv1d.cpp.
namespace cuseq {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Forward = std::vector<Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                    const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&, const OptionalTensor&, bool, bool);
using Backward = std::vector<Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                     const OptionalTensor&, const OptionalTensor&,
                                     const OptionalTensor&, const OptionalTensor&,
                                     const OptionalTensor&, bool, const OptionalTensor&, bool);

std::vector<Tensor> call_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                 const ConvOptions& options) {
  static const auto op = find_op<Forward>("cuseq::causal_conv1d");
  return op.call(x, weight, bias, options.cu_seqlens, options.cu_seqlens_padded, options.seq_idx,
                 options.initial_states, options.silu, options.final_states);
}

std::vector<Tensor> call_backward(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                  const OptionalTensor& bias, const ConvOptions& options,
                                  const OptionalTensor& grad_final_states, bool weight_grads) {
  static const auto op = find_op<Backward>("cuseq::causal_conv1d_backward");
  return op.call(grad_out, x, weight, bias, options.cu_seqlens, options.cu_seqlens_padded,
                 options.seq_idx, options.initial_states, options.silu, grad_final_states,
                 weight_grads);
}

// Return the gradient with the contiguous dimension of x. Gradients may have any strides, such as
// the expanded zeros of sum().
Tensor ordered_like(const Tensor& grad, const Tensor& x) {
  const auto is_contiguous_in = [](const Tensor& rows, int64_t dim) {
    return rows.sym_size(dim) == 1 || rows.sym_stride(dim) == 1;
  };
  const bool channel_major = !is_contiguous_in(x, -1) && is_contiguous_in(x, -2);
  if (is_contiguous_in(grad, channel_major ? -2 : -1)) return grad;
  return channel_major ? grad.transpose(-1, -2).contiguous().transpose(-1, -2) : grad.contiguous();
}

class CausalConv1d : public torch::autograd::Function<CausalConv1d> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& initial_states,
                               const ConvOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({x, weight, or_undefined(bias), or_undefined(options.cu_seqlens),
                            or_undefined(options.cu_seqlens_padded), or_undefined(options.seq_idx),
                            or_undefined(initial_states)});
    ctx->saved_data["silu"] = options.silu;
    ctx->set_materialize_grads(false);
    return call_forward(x, weight, bias, options);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OptionalTensor grad_final =
        grads.size() == 2 ? or_nullopt(grads[1]) : OptionalTensor(std::nullopt);
    variable_list result(5);
    if (!grads[0].defined() && !grad_final.has_value()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& x = saved[0];
    const OptionalTensor bias = or_nullopt(saved[2]);
    const ConvOptions options{or_nullopt(saved[3]), or_nullopt(saved[4]), or_nullopt(saved[5]),
                              or_nullopt(saved[6]), ctx->saved_data["silu"].toBool()};
    const Tensor grad_out =
        grads[0].defined() ? ordered_like(grads[0], x) : ordered_like(at::zeros_like(x), x);
    const bool weight_grads =
        ctx->needs_input_grad(1) || (bias.has_value() && ctx->needs_input_grad(2));
    const std::vector<Tensor> found =
        call_backward(grad_out, x, saved[1], bias, options, grad_final, weight_grads);
    size_t next = 0;
    result[0] = found[next++];
    if (weight_grads) result[1] = found[next++];
    if (weight_grads && bias.has_value()) result[2] = found[next++];
    if (options.initial_states.has_value()) result[3] = found[next++];
    return result;
  }
};

// The second derivative is not implemented. Asking for it raises instead of returning zero.
class CausalConv1dBackward : public torch::autograd::Function<CausalConv1dBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const Tensor& grad_out, const Tensor& x,
                               const Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& initial_states,
                               const OptionalTensor& grad_final_states, const ConvOptions& options,
                               bool weight_grads) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_out, x, weight, bias, options, grad_final_states, weight_grads);
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cuseq::causal_conv1d can be differentiated once: use eager PyTorch where you need the "
        "gradient of a gradient");
  }
};

std::vector<Tensor> conv_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& cu_seqlens,
                                  const OptionalTensor& cu_seqlens_padded,
                                  const OptionalTensor& seq_idx,
                                  const OptionalTensor& initial_states, bool silu,
                                  bool final_states) {
  const ConvOptions options{cu_seqlens, cu_seqlens_padded, seq_idx, initial_states,
                            silu,       final_states};
  const std::vector<Tensor> inputs = defined({x, weight, bias, initial_states});
  refuse_forward_mode(inputs, "cuseq::causal_conv1d");
  if (!any_requires_grad(inputs)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_forward(x, weight, bias, options);
  }
  return CausalConv1d::apply(x, weight, bias, initial_states, options);
}

std::vector<Tensor> conv_backward_autograd(
    const Tensor& grad_out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_padded,
    const OptionalTensor& seq_idx, const OptionalTensor& initial_states, bool silu,
    const OptionalTensor& grad_final_states, bool weight_grads) {
  const ConvOptions options{cu_seqlens, cu_seqlens_padded, seq_idx, initial_states, silu};
  const std::vector<Tensor> inputs =
      defined({grad_out, x, weight, bias, initial_states, grad_final_states});
  refuse_forward_mode(inputs, "cuseq::causal_conv1d_backward");
  if (!any_requires_grad(inputs)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_out, x, weight, bias, options, grad_final_states, weight_grads);
  }
  return CausalConv1dBackward::apply(grad_out, x, weight, bias, initial_states, grad_final_states,
                                     options, weight_grads);
}

// Cast x to the autocast dtype of the region, as conv1d does. The kernels take weights and states
// of any type, so those keep their precision.
template <c10::DeviceType device>
std::vector<Tensor> forward_autocast(const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                                     const OptionalTensor& cu_seqlens_padded,
                                     const OptionalTensor& seq_idx,
                                     const OptionalTensor& initial_states, bool silu,
                                     bool final_states) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const ConvOptions options{cu_seqlens, cu_seqlens_padded, seq_idx, initial_states,
                            silu,       final_states};
  return call_forward(at::autocast::cached_cast(dtype, x, device), weight, bias, options);
}

}  // namespace

std::vector<Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  const ConvOptions& options) {
  return call_forward(x, weight, bias, options);
}

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("causal_conv1d", TORCH_FN(conv_autograd));
  m.impl("causal_conv1d_backward", TORCH_FN(conv_backward_autograd));
}

TORCH_LIBRARY_IMPL(cuseq, AutocastCPU, m) {
  m.impl("causal_conv1d", TORCH_FN(forward_autocast<at::kCPU>));
}

TORCH_LIBRARY_IMPL(cuseq, AutocastCUDA, m) {
  m.impl("causal_conv1d", TORCH_FN(forward_autocast<at::kCUDA>));
}

}  // namespace cuseq
