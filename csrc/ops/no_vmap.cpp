#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// Without this, vmap would run these ops once per slice, or raise that it does not support lists.
namespace cuseq {
namespace {

void refuse_vmap(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name().name,
                              " has no batching rule for vmap: pass the batch as dimensions of "
                              "its own, as qkv_format \"bshd\" or \"bhsd\", or as one packed row");
}

void refuse_vmap_of_masks(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name().name,
      " has no batching rule for vmap: make the masks of the rows one by one, outside");
}

}  // namespace

TORCH_LIBRARY_IMPL(cuseq, FuncTorchBatched, m) {
  for (const char* name :
       {"apply_rope", "apply_rope_", "apply_qk_norm_rope", "apply_qk_norm_rope_",
        "apply_qk_norm_rope_backward", "causal_conv1d", "causal_conv1d_backward", "gather_rows"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
  }
  m.impl("block_mask", torch::CppFunction::makeFromBoxedFunction<&refuse_vmap_of_masks>());
}

}  // namespace cuseq
