#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// Built instead of the CUDA kernels when there is no CUDA toolkit or torch is a CPU build: each op
// called with CUDA tensors says how to get them.
namespace cuseq {
namespace {

void built_without_cuda(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name().name,
      " was called with CUDA tensors, but this cuseq was built without CUDA: install the CUDA "
      "toolkit that matches torch.version.cuda (nvcc), then reinstall cuseq with "
      "`pip install --no-build-isolation --force-reinstall --no-deps .`");
}

}  // namespace

TORCH_LIBRARY_IMPL(cuseq, CUDA, m) {
  for (const char* name : {"cu_seqlens",
                           "max_seqlen",
                           "max_seqlen_sync",
                           "last_token_indices",
                           "layout_metadata",
                           "segment_metadata",
                           "position_ids",
                           "seq_ids",
                           "token_metadata",
                           "lengths_from_padding_mask",
                           "mask_rows",
                           "segment_rows",
                           "cp_rows",
                           "cu_seqlens_from_position_ids",
                           "mask_boundary_labels",
                           "gather_rows",
                           "mask_ranges",
                           "dense_mask",
                           "block_mask",
                           "varlen_attention",
                           "varlen_attention_backward",
                           "apply_rope",
                           "apply_rope_",
                           "apply_qk_norm_rope",
                           "apply_qk_norm_rope_",
                           "apply_qk_norm_rope_backward",
                           "bin_pack",
                           "pack_window",
                           "row_costs"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
  }
}

}  // namespace cuseq
