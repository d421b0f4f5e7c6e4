#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <utility>
#include <vector>

#include "ops/autograd.h"
#include "ops/dispatch.h"
#include "ops/types.h"

// Autograd of cuseq::token_logprobs; its kernels are in token_logprobs.cpp.
namespace cuseq::autograd::token_logprobs {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// logprobs, entropies, logsumexp and mean
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
// of hidden, weight and bias
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// The arguments after the tensors: temperature, chunk_size, entropy, scale, softcap.
using Options = std::tuple<double, OptionalInt, bool, double, OptionalDouble>;
constexpr size_t kEntropy = 2;

template <typename>
struct Autograd;

template <typename... Rest>
struct Autograd<std::tuple<Rest...>> {
  static Outputs call_forward(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                              const OptionalTensor& bias, Rest... options) {
    static const auto op =
        find_op<Outputs(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                        Rest...)>("cuseq::token_logprobs");
    return op.call(hidden, weight, targets, bias, options...);
  }

  static Gradients call_backward(const OptionalTensor& grad_logprobs,
                                 const OptionalTensor& grad_entropies, const Tensor& logsumexp,
                                 const Tensor& mean, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& targets, const OptionalTensor& bias,
                                 Rest... options) {
    static const auto op =
        find_op<Gradients(const OptionalTensor&, const OptionalTensor&, const Tensor&,
                          const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                          const OptionalTensor&, Rest...)>("cuseq::token_logprobs_backward");
    return op.call(grad_logprobs, grad_entropies, logsumexp, mean, hidden, weight, targets, bias,
                   options...);
  }

  class Once : public torch::autograd::Function<Once> {
   public:
    static constexpr bool is_traceable = true;

    // logsumexp and mean are returned outside of autograd: compiled autograd accepts no output
    // marked as not differentiable.
    static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                                 const OptionalTensor& bias, const Tensor& targets,
                                 const Options& options, Outputs* returned) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      *returned = std::apply(
          [&](Rest... rest) { return call_forward(hidden, weight, targets, bias, rest...); },
          options);
      const auto& [logprobs, entropies, logsumexp, mean] = *returned;
      ctx->save_for_backward({hidden, weight, or_undefined(bias), targets, logsumexp, mean});
      ctx->saved_data["options"] = options;
      ctx->set_materialize_grads(false);
      if (!std::get<kEntropy>(options)) return {logprobs};
      return {logprobs, entropies};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
      variable_list result(6);
      const auto options = ctx->saved_data["options"].to<Options>();
      const OptionalTensor of_entropies =
          std::get<kEntropy>(options) ? or_nullopt(grads[1]) : std::nullopt;
      if (!grads[0].defined() && !of_entropies.has_value()) return result;
      const variable_list saved = ctx->get_saved_variables();
      const OptionalTensor bias = or_nullopt(saved[2]);
      Tensor of_bias;
      std::tie(result[0], result[1], of_bias) = std::apply(
          [&](Rest... rest) {
            return call_backward(or_nullopt(grads[0]), of_entropies, saved[4], saved[5], saved[0],
                                 saved[1], saved[3], bias, rest...);
          },
          options);
      if (bias.has_value()) result[2] = of_bias;
      return result;
    }
  };

  // The second derivative is not implemented. Asking for it raises instead of returning zero.
  class Twice : public torch::autograd::Function<Twice> {
   public:
    static constexpr bool is_traceable = true;

    static variable_list forward(AutogradContext*, const OptionalTensor& grad_logprobs,
                                 const OptionalTensor& grad_entropies, const Tensor& logsumexp,
                                 const Tensor& mean, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& targets, const OptionalTensor& bias,
                                 Rest... options) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      auto [of_hidden, of_weight, of_bias] =
          call_backward(grad_logprobs, grad_entropies, logsumexp, mean, hidden, weight, targets,
                        bias, options...);
      return {of_hidden, of_weight, of_bias};
    }

    static variable_list backward(AutogradContext*, const variable_list&) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          false,
          "cuseq::token_logprobs can be differentiated once: use log_softmax in eager PyTorch "
          "where you need the gradient of a gradient");
    }
  };

  static Outputs forward(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                         const OptionalTensor& bias, Rest... rest) {
    const std::vector<Tensor> inputs = defined({hidden, weight, bias});
    refuse_forward_mode(inputs, "cuseq::token_logprobs");
    if (!any_requires_grad(inputs)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call_forward(hidden, weight, targets, bias, rest...);
    }
    Outputs outputs;
    const Options options{rest...};
    const variable_list differentiable =
        Once::apply(hidden, weight, bias, targets, options, &outputs);
    std::get<0>(outputs) = differentiable[0];
    if (std::get<kEntropy>(options)) std::get<1>(outputs) = differentiable[1];
    return outputs;
  }

  static Gradients backward(const OptionalTensor& grad_logprobs,
                            const OptionalTensor& grad_entropies, const Tensor& logsumexp,
                            const Tensor& mean, const Tensor& hidden, const Tensor& weight,
                            const Tensor& targets, const OptionalTensor& bias, Rest... options) {
    const std::vector<Tensor> inputs =
        defined({grad_logprobs, grad_entropies, logsumexp, mean, hidden, weight, bias});
    refuse_forward_mode(inputs, "cuseq::token_logprobs_backward");
    if (!any_requires_grad(inputs)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call_backward(grad_logprobs, grad_entropies, logsumexp, mean, hidden, weight, targets,
                           bias, options...);
    }
    const variable_list grads = Twice::apply(grad_logprobs, grad_entropies, logsumexp, mean, hidden,
                                             weight, targets, bias, options...);
    return {grads[0], grads[1], grads[2]};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("token_logprobs", TORCH_FN(Autograd<Options>::forward));
  m.impl("token_logprobs_backward", TORCH_FN(Autograd<Options>::backward));
}

}  // namespace cuseq::autograd::token_logprobs
