#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "cuseq/macros.h"

namespace cuseq {

// Starts the one copy of device numbers to pinned memory that host code may later wait for, and
// returns where they will lie: vectors of one dtype. Never waits.
CUSEQ_API std::vector<at::Tensor> start_host_copy(const std::vector<at::Tensor>& on_device);

// Copies both int32 vectors, contiguous on the CPU, in one copy from pinned memory to the device.
// Never waits, where a copy from pageable memory would.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> copy_to_device(const at::Tensor& first,
                                                            const at::Tensor& second,
                                                            c10::Device device);

// Waits for the host copy of which the tensor is the first part, by its event, never for the
// stream. Returns at once for any other tensor.
CUSEQ_API void wait_host_copy(const at::Tensor& on_host);

// How many host copies nobody has waited for yet.
CUSEQ_API int64_t pending_host_copies();

}  // namespace cuseq
