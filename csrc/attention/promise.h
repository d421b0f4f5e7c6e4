#pragma once

#include <cstdint>

#include "cuseq/macros.h"
#include "ops/types.h"

// How many sequences a CUDA graph attends over. Offsets have room for max_seqs, and kernels pay for
// each of them in a graph, which does not know the lengths. Who replays the graph does know them.
namespace cuseq::attention {

// Promise that graphs captured from now on are replayed with at most so many sequences in these
// offsets; without a number, withdraw the promise. The offsets must outlive it.
CUSEQ_API void promise_sequences(const Tensor& cu_seqlens, OptionalInt at_most);

// Return the promised number, or else the sequences that the offsets have room for.
CUSEQ_API int64_t promised_sequences(const Tensor& cu_seqlens);

}  // namespace cuseq::attention
