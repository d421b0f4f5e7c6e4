#pragma once

#include <ATen/core/Tensor.h>

// Exact tests for shared elements of strided tensors. PyTorch's own test gives up on slices of one
// projection, such as q and k.
namespace cuseq {

// Return whether two positions of the tensor are the same element in memory.
bool overlaps_itself(const at::Tensor& tensor);

// Return whether the tensors share an element in memory. The dtypes must be equal.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace cuseq
