#pragma once

#include <cstdint>

// tree_meta and tree_rows tell attention about a tree, as host_meta and cu_seqlens tell it about
// sequences. tree_meta is an int32 CPU tensor, which ops read when they run; tree_rows is an int32
// tensor on the row's device. Their sizes depend on the capacities alone, so one compiled graph
// serves every tree.
//
// The nodes at depth d of a tree are the keys of call d + 1, and their descendants its queries.
// Between them lie pairs without queries or without keys. tree_rows holds, for each node, the end
// of its last descendant; then the offsets of the queries of all calls, call after call, in the
// row; then those of their keys. The unused end of a section is zero.
namespace cuseq {

// Index of each entry of tree_meta. Python reads these numbers as `_C.TreeMeta`.
enum TreeMetaSlot : int32_t {
  kTreeDepth,            // number of calls beside the one of each node with itself
  kTreeLongestPath,      // tokens of the longest path
  kTreeMeanKeys,         // keys that a token sees, on average, rounded up
  kTreeMeanDepth,        // ancestors of a token's node, on average, rounded up
  kTreeNumNodes,         // number of nodes
  kTreeNodeCapacity,     // entries of tree_rows for nodes,
  kTreeOffsetsCapacity,  // for offsets of queries, and for offsets of keys
  kTreeMaxDepth,         // most calls that tree_meta has room for
  kTreeMetaHead,         // size of this head; the calls follow
};

// The entries of tree_meta for a call.
enum TreeCallSlot : int32_t {
  kCallFirst,         // index of its first offset, in the sections of queries and of keys
  kCallPairs,         // number of pairs; 0: the call computes nothing
  kCallLongestQuery,  // queries of the pair that has most
  kCallLongestKeys,   // keys of the pair that has most
  kCallQueryEnd,      // row after the last query
  kCallKeyEnd,        // row after the last key
  kTreeCallSize,
};

}  // namespace cuseq
