#pragma once

#include <cstdint>

#include "cuseq/macros.h"
#include "ops/types.h"

// How many sequences a CUDA graph attends over. Offsets have room for max_seqs, and kernels pay for
// each of them in a graph, which does not know the lengths. Who replays the graph may know how many
// there will be, and then captures with a host_meta that says so (kOfReplays).
namespace cuseq::attention {

// Return how many sequences a capture over these offsets attends over. `host_meta` is the layout's;
// what is not on the host yet is not waited for.
int64_t sequences_of_capture(const Tensor& cu_seqlens, const OptionalTensor& host_meta);

// Return whether a graph with room for so many sequences costs noticeably more than its row needs.
// Without a number of sequences, only the default room, one sequence a token, counts as too much.
CUSEQ_API bool has_needless_room(int64_t room, OptionalInt sequences, int64_t tokens);

// Warn once per process if a capture over these offsets has needless room, unless its host_meta is
// of replays: who made that has chosen the room.
void warn_of_needless_room(const Tensor& cu_seqlens, const OptionalTensor& host_meta,
                           int64_t tokens);

}  // namespace cuseq::attention
