#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuseq/macros.h"
#include "trees/tree_meta.h"

// Rows whose samples share prefixes, without torch. Each node is a run of tokens that a set of
// samples shares; a sample is the path from a root to a node.
//
// Worked example, a prompt of 3 tokens with completions of 2 and 1:
//   node       0      1    2
//   token      0 1 2  3 4  5
//   position   0 1 2  3 4  3
//   samples    {0 1 2 3 4} and {0 1 2 5}
namespace cuseq::trees {

struct CUSEQ_API Tree {
  // By node, in the order of the row: a node comes before its descendants, and these lie together.
  std::vector<int32_t> begins;     // [n + 1], first token; the last entry is the end of the row
  std::vector<int32_t> ends;       // end of the last descendant's tokens
  std::vector<int32_t> parents;    // -1 for a root
  std::vector<int32_t> depths;     // number of ancestors
  std::vector<int32_t> positions;  // tokens of the ancestors, the position of the first token
  // By sample:
  std::vector<int32_t> samples;  // last node of the path
  std::vector<int32_t> context;  // tokens at the start of the path that are not targets

  int32_t size() const { return static_cast<int32_t>(parents.size()); }
  int32_t length(int32_t node) const { return begins[node + 1] - begins[node]; }
  int64_t tokens() const { return begins.back(); }
  int32_t num_samples() const { return static_cast<int32_t>(samples.size()); }
  int64_t path_length(int32_t sample) const {
    return positions[samples[sample]] + length(samples[sample]);
  }
  int64_t longest_path() const;
  int64_t mean_keys() const;   // keys that a token sees, on average, rounded up; 0 without tokens
  int64_t mean_depth() const;  // ancestors of a token's node, the same way
  int32_t deepest() const;     // most ancestors of a node; 0 without nodes

  // Return the nodes of a sample, root first.
  std::vector<int32_t> path(int32_t sample) const;
};

// Return the tree of nodes that are given in the order of the row. The samples are the leaves, in
// that order. Return nothing, and say why, if the nodes are in another order.
CUSEQ_API std::optional<Tree> tree_of_nodes(std::span<const int64_t> lengths,
                                            std::span<const int64_t> parents, std::string* why);

// The tokens of a sequence and, if equal tokens may differ, a key for each.
struct Sequence {
  const int64_t* tokens;
  const int64_t* keys;  // or null
  int64_t length;
};

// The tree that shares the common prefixes of sequences, and where each node's tokens are from.
struct SharedTree {
  struct Source {
    int32_t sequence;
    int64_t begin;
  };
  Tree tree;
  std::vector<Source> sources;  // by node
};

// Share every run of at least `min_shared` common tokens; repeat shorter ones in each branch.
CUSEQ_API SharedTree share_prefixes(std::span<const Sequence> sequences, int64_t min_shared);

// The numbers of tree_meta, and the used part of each section of tree_rows. Attention reads both;
// tree_meta.h describes them.
struct Calls {
  std::vector<int32_t> meta;
  std::vector<int32_t> queries;
  std::vector<int32_t> keys;

  int64_t node_capacity() const { return meta[kTreeNodeCapacity]; }
  int64_t offsets_capacity() const { return meta[kTreeOffsetsCapacity]; }
};
CUSEQ_API Calls calls_of(const Tree& tree, int64_t max_seqs, int64_t max_depth,
                         int64_t total_tokens);

}  // namespace cuseq::trees
