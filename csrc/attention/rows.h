#pragma once

#include <initializer_list>

#include "attention/call.h"

// Rows in the form that PyTorch's kernels want, and back.
namespace cuseq::attention {

// The tensor itself where its rows start at multiples of 16 bytes, as the kernels of PyTorch want
// them, else a copy.
Tensor aligned_rows(const Tensor& rows);

// The last dimension filled up with zeros to `size`; the tensor itself where it has that size.
Tensor pad_last_dim(const Tensor& tensor, int64_t size);

// Zeros the rows after the last sequence, in place: kernels leave them uninitialised, and one NaN
// there would poison weight gradients.
void zero_tail(std::initializer_list<Tensor> rows, const Sequences& sequences);

// The same for the gradients of q, k and v.
Gradients with_zero_tails(const Call& call, Gradients gradients);

}  // namespace cuseq::attention
