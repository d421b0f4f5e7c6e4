#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/call.h"
#include "cuseq/attention.h"

// The calls that attention over a tree makes besides the one of each node with itself.
namespace cuseq::attention {

struct TreeCall {
  Sequences queries;  // descendants of the nodes at one depth
  Sequences keys;     // those nodes
  int64_t query_end;  // the offsets lie in the rows [0, query_end)
  int64_t key_end;    // and in [0, key_end)
};

using TreeCalls = std::vector<TreeCall>;

// Check tree_rows and tree_meta (csrc/trees/tree_meta.h) and the options that a tree has. Return
// the calls, or none if the row is not a tree. In a graph capture tree_meta is not read, because
// the graph will be replayed with other trees.
std::optional<TreeCalls> tree_calls_of(const Tensor& q, const AttentionOptions& options,
                                       OptionalInt longest_bound);

}  // namespace cuseq::attention
