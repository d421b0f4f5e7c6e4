#pragma once

#include <ATen/core/Tensor.h>

// Whether strided tensors share elements, exactly: PyTorch's own test gives up on slices of one
// projection, such as q and k.
namespace cuseq {

// True where two positions of the tensor are one element in memory.
bool overlaps_itself(const at::Tensor& tensor);

// True where an element of one is an element of the other. The dtypes must be the same.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace cuseq
