#pragma once

#include <ATen/core/Tensor.h>

#include "cuseq/macros.h"

namespace cuseq {

// Raise ValueError for a tensor without memory of its own: a fake one, or a wrapper in Python.
CUSEQ_API void check_memory(const at::Tensor& tensor, const char* name);

// Return the values of a tensor of integers for a check to read: int64 on the host, in order and
// contiguous, however the tensor lies in memory. On a device this synchronises.
at::Tensor host_values(const at::Tensor& tensor);

}  // namespace cuseq
