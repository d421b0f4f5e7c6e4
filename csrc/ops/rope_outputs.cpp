#include "ops/rope_outputs.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#ifdef CUSEQ_WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

#include "ops/overlap.h"
#include "ops/types.h"

namespace cuseq {

void check_written_in_place(TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(!overlaps_itself(tensors[i]), i == 0 ? "q" : "k",
                      " must not overlap itself if it is rotated in place, got sizes ",
                      tensors[i].sizes(), " and strides ", tensors[i].strides());
  }
  TORCH_CHECK_VALUE(tensors.size() != 2 || !overlap(tensors[0], tensors[1]),
                    "q and k must not overlap if both are rotated in place, since shared elements "
                    "would be rotated twice, got sizes ",
                    tensors[0].sizes(), " and ", tensors[1].sizes(), " and strides ",
                    tensors[0].strides(), " and ", tensors[1].strides());
}

Tensor empty_output(const Tensor& like) {
#ifdef CUSEQ_WITH_CUDA
  // In deterministic mode PyTorch may need to fill empty tensors.
  if (like.is_cuda() && !at::globalContext().deterministicAlgorithms()) {
    const auto strides = [&] {
      return like.is_non_overlapping_and_dense()
                 ? like.strides().vec()
                 : at::infer_dense_strides(like.sizes(), like.strides());
    };
    return at::detail::empty_strided_cuda(like.sizes(), strides(), like.scalar_type(),
                                          like.device());
  }
#endif
  return at::empty_like(like);
}

void refuse_table_gradients(const RopeOptions& options) {
  for (const Tensor& table : {options.cos, options.sin}) {
    const bool wants_gradient = at::GradMode::is_enabled() && table.requires_grad();
    TORCH_CHECK_NOT_IMPLEMENTED(!wants_gradient && !table._fw_grad(/*level=*/0).defined(),
                                "cos and sin must not require grad, since no gradient is computed "
                                "for them: detach them, or rotate in "
                                "eager PyTorch to train them");
  }
}

Tensor with_contiguous_heads(const Tensor& grad) {
  return grad.sym_stride(-1) == 1 ? grad : grad.contiguous();
}

}  // namespace cuseq
