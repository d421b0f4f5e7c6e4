#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cuseq/rope.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/rope_options.h"
#include "ops/rope_outputs.h"
#include "ops/types.h"

namespace cuseq {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const auto& rope() {
  static const auto op = find_rope_op<std::vector<Tensor>, TensorList>("cuseq::apply_rope");
  return op;
}

const auto& rope_in_place() {
  static const auto op = find_rope_op<void, TensorList>("cuseq::apply_rope_");
  return op;
}

std::vector<Tensor> rope_kernel(const RopeOptions& options, TensorList tensors) {
  RopeArgs args = plan_rope(tensors, options);
  std::vector<Tensor> outputs;
  outputs.reserve(tensors.size());
  for (int i = 0; i < args.n_tensors; ++i) {
    outputs.push_back(empty_output(tensors[i]));
    write_to(outputs[i], options, args.tensors[i]);
  }
  CUSEQ_RUN(apply_rope, tensors[0], args);
  return outputs;
}

void rope_in_place_kernel(const RopeOptions& options, TensorList tensors) {
  RopeArgs args = plan_rope(tensors, options);
  check_written_in_place(tensors);
  for (int i = 0; i < args.n_tensors; ++i) write_to(tensors[i], options, args.tensors[i]);
  CUSEQ_RUN(apply_rope, tensors[0], args);
}

// Rotate the gradients that exist and are needed back by the same angles, in one call.
variable_list turn_back(AutogradContext* ctx, const variable_list& grads) {
  SavedRopeOptions saved(ctx, ctx->get_saved_variables(), 0);
  saved.options.inverse = !saved.options.inverse;
  std::vector<Tensor> defined;
  const auto wanted = [&](size_t i) { return grads[i].defined() && ctx->needs_input_grad(i); };
  for (size_t i = 0; i < grads.size(); ++i) {
    if (wanted(i)) defined.push_back(with_contiguous_heads(grads[i]));
  }
  variable_list result(grads.size() + 1);  // the options have no gradient
  if (defined.empty()) return result;
  const std::vector<Tensor> turned = call_rope(rope(), saved.options, TensorList(defined));
  size_t next = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (wanted(i)) result[i] = turned[next++];
  }
  return result;
}

class ApplyRope : public torch::autograd::Function<ApplyRope> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, TensorList tensors,
                               const RopeOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    SavedRopeOptions::save(ctx, options, {});
    ctx->set_materialize_grads(false);
    return call_rope(rope(), options, tensors);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return turn_back(ctx, grads);
  }
};

// Autograd node for a tensor that was rotated in place. One node per tensor: autograd does not
// allow a function with two outputs to modify views, such as slices of a fused projection.
class RotatedInPlace : public torch::autograd::Function<RotatedInPlace> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const RopeOptions& options) {
    SavedRopeOptions::save(ctx, options, {});
    ctx->set_materialize_grads(false);
    ctx->mark_dirty({tensor});
    return tensor;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return turn_back(ctx, grads);
  }
};

std::vector<Tensor> rope_autograd(const RopeOptions& options, TensorList tensors) {
  refuse_table_gradients(options);
  refuse_forward_mode(tensors, "cuseq::apply_rope");
  if (!any_requires_grad(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_rope(rope(), options, tensors);
  }
  return ApplyRope::apply(tensors, options);
}

void rope_in_place_autograd(const RopeOptions& options, TensorList tensors) {
  refuse_table_gradients(options);
  refuse_forward_mode(tensors, "cuseq::apply_rope_");
  const bool needs_history = any_requires_grad(tensors);
  if (needs_history) {
    for (const Tensor& tensor : tensors) {
      torch::autograd::check_inplace(tensor, tensor.requires_grad());
    }
  }
  {
    const at::AutoDispatchBelowAutograd below_autograd;
    call_rope(rope_in_place(), options, tensors);
  }
  if (!needs_history) return;
  for (const Tensor& tensor : tensors) {
    if (tensor.requires_grad()) RotatedInPlace::apply(tensor, options);
  }
}

void rope_in_place_counted(const RopeOptions& options, TensorList tensors) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rope(rope_in_place(), options, tensors);
  }
  for (const Tensor& tensor : tensors) torch::autograd::increment_version(tensor);
}

}  // namespace

std::vector<Tensor> apply_rope(TensorList tensors, const RopeOptions& options) {
  return call_rope(rope(), options, tensors);
}

void apply_rope_(TensorList tensors, const RopeOptions& options) {
  call_rope(rope_in_place(), options, tensors);
}

CUSEQ_REGISTER(m) {
  m.impl("apply_rope", TORCH_FN(RopeKernel<rope_kernel>::call));
  m.impl("apply_rope_", TORCH_FN(RopeKernel<rope_in_place_kernel>::call));
}

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("apply_rope", TORCH_FN(RopeKernel<rope_autograd>::call));
  m.impl("apply_rope_", TORCH_FN(RopeKernel<rope_in_place_autograd>::call));
}

TORCH_LIBRARY_IMPL(cuseq, ADInplaceOrView, m) {
  m.impl("apply_rope_", TORCH_FN(RopeKernel<rope_in_place_counted>::call));
}

}  // namespace cuseq
