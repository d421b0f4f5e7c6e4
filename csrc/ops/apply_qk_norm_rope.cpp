#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cuseq/rope.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/rope_options.h"
#include "ops/rope_outputs.h"
#include "ops/types.h"

namespace cuseq {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<Tensor>;
using Outputs = std::tuple<Tensors, Tensors>;

const auto& forward_op() {
  static const auto op =
      find_rope_op<Outputs, TensorList, TensorList, double, double>("cuseq::apply_qk_norm_rope");
  return op;
}

const auto& in_place_op() {
  static const auto op =
      find_rope_op<void, TensorList, TensorList, double, double>("cuseq::apply_qk_norm_rope_");
  return op;
}

const auto& backward_op() {
  static const auto op =
      find_rope_op<Outputs, TensorList, TensorList, TensorList, TensorList, double, bool>(
          "cuseq::apply_qk_norm_rope_backward");
  return op;
}

constexpr const char* kWeightNames[2] = {"q_weight", "k_weight"};

at::ScalarType arithmetic_of(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

QkNormRopeArgs plan(TensorList tensors, TensorList weights, double weight_offset,
                    const RopeOptions& options) {
  QkNormRopeArgs args;
  args.rope = plan_rope(tensors, options);
  args.weight_offset = weight_offset;
  args.mean_factor = 1.0 / static_cast<double>(args.rope.head_dim);
  TORCH_CHECK_VALUE(weights.size() == tensors.size(),
                    "weights must have as many entries as tensors, ", tensors.size(), ", got ",
                    weights.size());
  args.weight_dtype = float_type(weights[0], kWeightNames[0]);
  for (size_t i = 0; i < weights.size(); ++i) {
    const char* name = kWeightNames[i];
    TORCH_CHECK_VALUE(weights[i].dim() == 1 && weights[i].size(0) == args.rope.head_dim, name,
                      " must have shape [head_dim = ", args.rope.head_dim, "], got ",
                      weights[i].sizes());
    TORCH_CHECK_TYPE(weights[i].scalar_type() == weights[0].scalar_type(), name,
                     " must be of q_weight's dtype, ", dtype_name(weights[0].scalar_type()),
                     ", got ", dtype_name(weights[i].scalar_type()));
    TORCH_CHECK_VALUE(weights[i].device() == tensors[0].device(), name, " must lie on q's device, ",
                      tensors[0].device(), ", got ", weights[i].device());
    TORCH_CHECK_VALUE(weights[i].is_contiguous(), name, " must be contiguous, got stride ",
                      weights[i].strides());
    args.norms[i].weight = weights[i].const_data_ptr();
  }
  return args;
}

QkNormRopeArgs plan_forward(TensorList tensors, TensorList weights, double eps,
                            double weight_offset, const RopeOptions& options) {
  QkNormRopeArgs args = plan(tensors, weights, weight_offset, options);
  TORCH_CHECK_VALUE(eps >= 0, "eps must not be negative, got ", eps);
  args.eps = eps;
  return args;
}

Outputs forward_kernel(const RopeOptions& options, TensorList tensors, TensorList weights,
                       double eps, double weight_offset) {
  QkNormRopeArgs args = plan_forward(tensors, weights, eps, weight_offset, options);
  Tensors outputs;
  Tensors rstds;
  for (int i = 0; i < args.rope.n_tensors; ++i) {
    RopeTensor& tensor = args.rope.tensors[i];
    outputs.push_back(empty_output(tensors[i]));
    rstds.push_back(at::empty({args.rope.batch, args.rope.tokens, tensor.heads},
                              tensors[i].options().dtype(arithmetic_of(tensors[i]))));
    write_to(outputs[i], options, tensor);
    args.norms[i].rstd = rstds[i].mutable_data_ptr();
  }
  CUSEQ_RUN(apply_qk_norm_rope, tensors[0], args);
  return {std::move(outputs), std::move(rstds)};
}

void in_place_kernel(const RopeOptions& options, TensorList tensors, TensorList weights, double eps,
                     double weight_offset) {
  QkNormRopeArgs args = plan_forward(tensors, weights, eps, weight_offset, options);
  check_written_in_place(tensors);
  for (int i = 0; i < args.rope.n_tensors; ++i) {
    write_to(tensors[i], options, args.rope.tensors[i]);
  }
  CUSEQ_RUN(apply_qk_norm_rope, tensors[0], args);
}

Outputs backward_kernel(const RopeOptions& options, TensorList grads, TensorList tensors,
                        TensorList weights, TensorList rstds, double weight_offset,
                        bool weight_grads) {
  QkNormRopeArgs args = plan(grads, weights, weight_offset, options);
  TORCH_CHECK_VALUE(tensors.size() == grads.size() && rstds.size() == grads.size(),
                    "tensors and rstd must have as many entries as grads, ", grads.size(), ", got ",
                    tensors.size(), " and ", rstds.size());
  Tensors grad_tensors;
  Tensors grad_weights;
  Tensors dense_rstds;
  for (int i = 0; i < args.rope.n_tensors; ++i) {
    RopeTensor& tensor = args.rope.tensors[i];
    HeadNorm& norm = args.norms[i];
    TORCH_CHECK_VALUE(tensors[i].sizes() == grads[i].sizes(),
                      "grads must have the tensors' shape, ", tensors[i].sizes(), ", got ",
                      grads[i].sizes());
    TORCH_CHECK_TYPE(tensors[i].scalar_type() == grads[i].scalar_type(),
                     "grads must have the tensors' dtype, ", dtype_name(tensors[i].scalar_type()),
                     ", got ", dtype_name(grads[i].scalar_type()));
    TORCH_CHECK_VALUE(rstds[i].scalar_type() == arithmetic_of(grads[i]) &&
                          rstds[i].numel() == args.rope.batch * args.rope.tokens * tensor.heads,
                      "rstd must be what the forward returned, got ", rstds[i].sizes(), " of ",
                      dtype_name(rstds[i].scalar_type()));
    TORCH_CHECK_VALUE(
        tensors[i].device() == grads[i].device() && rstds[i].device() == grads[i].device(),
        "tensors and rstd must lie on the grads' device, ", grads[i].device(), ", got ",
        tensors[i].device(), " and ", rstds[i].device());
    TORCH_CHECK_VALUE(tensors[i].stride(-1) == 1 || tensors[i].numel() == 0,
                      "tensors must be contiguous in their last dimension, got strides ",
                      tensors[i].strides());
    norm.input = tensors[i].const_data_ptr();
    dense_rstds.push_back(rstds[i].contiguous());
    norm.rstd = const_cast<void*>(dense_rstds[i].const_data_ptr());  // only the forward writes it
    read_strides(tensors[i], options.qkv_format, norm.input_strides);
    grad_tensors.push_back(empty_output(tensors[i]));
    write_to(grad_tensors[i], options, tensor);
    if (!weight_grads) continue;
    grad_weights.push_back(empty_output(weights[i]));
    norm.weight_grad = grad_weights[i].mutable_data_ptr();
  }
  const auto run = [&] {
    Tensor partials;
    if (weight_grads) {
      const at::ScalarType sums = grads[0].is_cpu() ? at::kDouble : arithmetic_of(grads[0]);
      partials =
          at::empty({args.n_partials, 2, args.rope.head_dim}, grads[0].options().dtype(sums));
      args.partials = partials.mutable_data_ptr();
    }
    CUSEQ_RUN(apply_qk_norm_rope_backward, grads[0], args);
  };
#ifdef CUSEQ_WITH_CUDA
  if (grads[0].is_cuda()) {
    const c10::cuda::CUDAGuard guard(grads[0].device());
    args.n_partials = cuda::qk_norm_rope_partials(args);
    run();
    return {std::move(grad_tensors), std::move(grad_weights)};
  }
#endif
  args.n_partials = cpu::qk_norm_rope_partials(args);
  run();
  return {std::move(grad_tensors), std::move(grad_weights)};
}

Tensors joined(TensorList first, TensorList second) {
  Tensors all = first.vec();
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

// Return whether output `i` has a gradient and its tensor or its weight needs one.
bool has_gradient(AutogradContext* ctx, const variable_list& output_grads, size_t i) {
  return output_grads[i].defined() &&
         (ctx->needs_input_grad(i) || ctx->needs_input_grad(output_grads.size() + i));
}

class ApplyQkNormRope : public torch::autograd::Function<ApplyQkNormRope> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, TensorList tensors, TensorList weights,
                               double eps, double weight_offset, const RopeOptions& options,
                               Tensors* returned_rstds) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [outputs, rstds] = call_rope(forward_op(), options, tensors, weights, eps, weight_offset);
    Tensors saved = joined(tensors, weights);
    saved.insert(saved.end(), rstds.begin(), rstds.end());
    SavedRopeOptions::save(ctx, options, std::move(saved));
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->set_materialize_grads(false);
    // Returned outside of autograd: compiled autograd accepts no output marked as not
    // differentiable.
    *returned_rstds = std::move(rstds);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& output_grads) {
    const auto saved = ctx->get_saved_variables();
    const size_t n = output_grads.size();
    const TensorList all(saved);
    SavedRopeOptions options(ctx, saved, 3 * n);
    Tensors grads;
    Tensors tensors;
    Tensors weights;
    Tensors rstds;
    bool weight_grads = false;
    for (size_t i = 0; i < n; ++i) {
      if (!has_gradient(ctx, output_grads, i)) continue;
      weight_grads = weight_grads || ctx->needs_input_grad(n + i);
      grads.push_back(with_contiguous_heads(output_grads[i]));
      tensors.push_back(all[i]);
      weights.push_back(all[n + i]);
      rstds.push_back(all[2 * n + i]);
    }
    variable_list result(2 * n + 4);  // undefined for arguments that are not tensors
    if (grads.empty()) return result;
    const auto [grad_tensors, grad_weights] = call_rope(
        backward_op(), options.options, TensorList(grads), TensorList(tensors), TensorList(weights),
        TensorList(rstds), ctx->saved_data["weight_offset"].toDouble(), weight_grads);
    size_t next = 0;
    for (size_t i = 0; i < n; ++i) {
      if (!has_gradient(ctx, output_grads, i)) continue;
      result[i] = grad_tensors[next];
      if (weight_grads) result[n + i] = grad_weights[next];
      ++next;
    }
    return result;
  }
};

// The second derivative is not implemented. Asking for it raises instead of returning zero.
class QkNormRopeBackward : public torch::autograd::Function<QkNormRopeBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, TensorList grads, TensorList tensors,
                               TensorList weights, TensorList rstds, double weight_offset,
                               bool weight_grads, const RopeOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [grad_tensors, grad_weights] = call_rope(
        backward_op(), options, grads, tensors, weights, rstds, weight_offset, weight_grads);
    return joined(grad_tensors, grad_weights);
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cuseq::apply_qk_norm_rope has no second derivative: normalise in eager PyTorch and call "
        "cuseq.apply_rope where you need the gradient of a gradient");
  }
};

Outputs forward_autograd(const RopeOptions& options, TensorList tensors, TensorList weights,
                         double eps, double weight_offset) {
  refuse_table_gradients(options);
  refuse_forward_mode(tensors, "cuseq::apply_qk_norm_rope");
  refuse_forward_mode(weights, "cuseq::apply_qk_norm_rope");
  if (!any_requires_grad(tensors) && !any_requires_grad(weights)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_rope(forward_op(), options, tensors, weights, eps, weight_offset);
  }
  Tensors rstds;
  Tensors outputs = ApplyQkNormRope::apply(tensors, weights, eps, weight_offset, options, &rstds);
  return {std::move(outputs), std::move(rstds)};
}

void in_place_autograd(const RopeOptions& options, TensorList tensors, TensorList weights,
                       double eps, double weight_offset) {
  refuse_table_gradients(options);
  refuse_forward_mode(tensors, "cuseq::apply_qk_norm_rope_");
  refuse_forward_mode(weights, "cuseq::apply_qk_norm_rope_");
  TORCH_CHECK_VALUE(!any_requires_grad(tensors) && !any_requires_grad(weights),
                    "inplace must be False where a gradient is needed, since the gradient of the "
                    "norm needs its input, got True");
  const at::AutoDispatchBelowAutograd below_autograd;
  call_rope(in_place_op(), options, tensors, weights, eps, weight_offset);
}

void in_place_counted(const RopeOptions& options, TensorList tensors, TensorList weights,
                      double eps, double weight_offset) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rope(in_place_op(), options, tensors, weights, eps, weight_offset);
  }
  for (const Tensor& tensor : tensors) torch::autograd::increment_version(tensor);
}

Outputs backward_autograd(const RopeOptions& options, TensorList grads, TensorList tensors,
                          TensorList weights, TensorList rstds, double weight_offset,
                          bool weight_grads) {
  for (const TensorList list : {grads, tensors, weights, rstds}) {
    refuse_forward_mode(list, "cuseq::apply_qk_norm_rope_backward");
  }
  refuse_table_gradients(options);
  if (!any_requires_grad(grads) && !any_requires_grad(tensors) && !any_requires_grad(weights)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_rope(backward_op(), options, grads, tensors, weights, rstds, weight_offset,
                     weight_grads);
  }
  const variable_list all = QkNormRopeBackward::apply(grads, tensors, weights, rstds, weight_offset,
                                                      weight_grads, options);
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(grads.size());
  return {Tensors(all.begin(), middle), Tensors(middle, all.end())};
}

}  // namespace

std::tuple<Tensors, Tensors> apply_qk_norm_rope(TensorList tensors, TensorList weights, double eps,
                                                double weight_offset, const RopeOptions& options) {
  return call_rope(forward_op(), options, tensors, weights, eps, weight_offset);
}

void apply_qk_norm_rope_(TensorList tensors, TensorList weights, double eps, double weight_offset,
                         const RopeOptions& options) {
  call_rope(in_place_op(), options, tensors, weights, eps, weight_offset);
}

CUSEQ_REGISTER(m) {
  m.impl("apply_qk_norm_rope", TORCH_FN(RopeKernel<forward_kernel>::call));
  m.impl("apply_qk_norm_rope_", TORCH_FN(RopeKernel<in_place_kernel>::call));
  m.impl("apply_qk_norm_rope_backward", TORCH_FN(RopeKernel<backward_kernel>::call));
}

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("apply_qk_norm_rope", TORCH_FN(RopeKernel<forward_autograd>::call));
  m.impl("apply_qk_norm_rope_", TORCH_FN(RopeKernel<in_place_autograd>::call));
  m.impl("apply_qk_norm_rope_backward", TORCH_FN(RopeKernel<backward_autograd>::call));
}

TORCH_LIBRARY_IMPL(cuseq, ADInplaceOrView, m) {
  m.impl("apply_qk_norm_rope_", TORCH_FN(RopeKernel<in_place_counted>::call));
}

}  // namespace cuseq
