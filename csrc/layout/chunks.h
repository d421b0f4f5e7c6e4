#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "cuseq/macros.h"

// Offsets and chunks that kernels of recurrent layers read. The host computes them; all tensors are
// int32 on the CPU.
namespace cuseq {

// Return the offsets of the runs of tokens over which a recurrence may go, [n_runs + 1]: sequences,
// the padding after each, and the tail. No run is empty, and together they cover the row.
CUSEQ_API at::Tensor recurrent_offsets(const at::Tensor& lengths,
                                       const std::optional<at::Tensor>& segment_lengths,
                                       int64_t total_tokens);

// Cut each run into chunks of `chunk_size` tokens, of which the last may be shorter. Return the run
// and the number in it of each chunk, [n_chunks, 2], and the first chunk of each run, [n_runs + 1].
CUSEQ_API std::tuple<at::Tensor, at::Tensor> chunks_of(const at::Tensor& offsets,
                                                       int64_t chunk_size);

}  // namespace cuseq
