#pragma once

#include <ATen/core/Tensor.h>

#include "cuseq/rope.h"

// What the rotary ops write to, and what their autograd kernels check and bring into shape.
namespace cuseq {

// Raises ValueError where a tensor overlaps itself or the other, which would be rotated twice or
// raced for.
void check_written_in_place(at::TensorList tensors);

// An output as at::empty_like makes it, dense and with the dimensions in the input's order, without
// its way through the dispatcher, which takes longer than the rest of a call's checks.
at::Tensor empty_output(const at::Tensor& like);

// The table takes no gradient: silence would train it wrongly.
void refuse_table_gradients(const RopeOptions& options);

// Gradients come with any strides, such as the zeros of sum(); the kernels want a contiguous last
// dimension.
at::Tensor with_contiguous_heads(const at::Tensor& grad);

}  // namespace cuseq
