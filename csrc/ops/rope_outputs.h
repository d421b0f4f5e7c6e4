#pragma once

#include <ATen/core/Tensor.h>

#include "cuseq/rope.h"

// Outputs of the rotary ops, and checks of their autograd kernels.
namespace cuseq {

// Raise ValueError if a tensor overlaps itself or the other one. Shared elements would be rotated
// twice or written by several threads.
void check_written_in_place(at::TensorList tensors);

// Return an output like at::empty_like: dense, with the dimensions in the input's memory order. It
// skips the dispatcher, which takes longer than all other checks of a call.
at::Tensor empty_output(const at::Tensor& like);

// Raise NotImplementedError if cos or sin needs a gradient. They get none, and ignoring that would
// train them wrongly.
void refuse_table_gradients(const RopeOptions& options);

// Return a gradient with a contiguous last dimension, as the kernels need. Gradients may have any
// strides, such as the expanded zeros of sum().
at::Tensor with_contiguous_heads(const at::Tensor& grad);

}  // namespace cuseq
