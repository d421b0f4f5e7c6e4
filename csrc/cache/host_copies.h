#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "cuseq/macros.h"

namespace cuseq {

// Start an asynchronous copy of device vectors of one dtype to pinned memory. Return the host
// tensors; their values are valid after wait_host_copy. Never synchronises.
CUSEQ_API std::vector<at::Tensor> start_host_copy(const std::vector<at::Tensor>& on_device);

// Copy two contiguous int32 CPU vectors to the device in one copy. Uses pinned memory, because a
// copy from pageable memory would synchronise; this one never does.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> copy_to_device(const at::Tensor& first,
                                                            const at::Tensor& second,
                                                            c10::Device device);

// Wait for the host copy that the tensor is the first part of, by its event, not for the whole
// stream. Return at once for any other tensor.
CUSEQ_API void wait_host_copy(const at::Tensor& on_host);

// Return whether the tensor is the first part of a host copy that has not been waited for.
CUSEQ_API bool is_pending_host_copy(const at::Tensor& on_host);

// Return the number of host copies that have not been waited for.
CUSEQ_API int64_t pending_host_copies();

}  // namespace cuseq
