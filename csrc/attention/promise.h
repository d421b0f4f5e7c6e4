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

// Return whether a graph with room for so many sequences costs noticeably more than its row needs.
// Without a number of sequences, only the default room, one sequence a token, counts as too much.
CUSEQ_API bool has_needless_room(int64_t room, OptionalInt sequences, int64_t tokens);

// Warn once per process if a capture over these offsets has needless room and nobody has promised a
// number of sequences. `host_meta` is the layout's; what is not on the host yet is not waited for.
void warn_of_needless_room(const Tensor& cu_seqlens, const OptionalTensor& host_meta,
                           int64_t tokens);

}  // namespace cuseq::attention
