#include "trees/tree.h"

#include <algorithm>

#include "cuseq/seqlens.h"

namespace cuseq::trees {
namespace {

// The pairs of a call, as offsets that grow pair by pair.
class Pairs {
 public:
  // Add a node's descendants as queries and its tokens as keys, after the gaps before both.
  void add(int32_t query_begin, int32_t query_end, int32_t key_begin, int32_t key_end) {
    if (queries_.empty()) {
      queries_.push_back(query_begin);
      keys_.push_back(key_begin);
    }
    push(query_begin, keys_.back());
    push(queries_.back(), key_begin);
    push(query_end, key_end);
  }

  // Append the offsets, and write the call's entries of tree_meta.
  void write(Calls& calls, int32_t* call) const {
    if (queries_.empty()) return;
    call[kCallFirst] = static_cast<int32_t>(calls.queries.size());
    call[kCallPairs] = static_cast<int32_t>(queries_.size()) - 1;
    call[kCallLongestQuery] = longest(queries_);
    call[kCallLongestKeys] = longest(keys_);
    call[kCallQueryEnd] = queries_.back();
    call[kCallKeyEnd] = keys_.back();
    calls.queries.insert(calls.queries.end(), queries_.begin(), queries_.end());
    calls.keys.insert(calls.keys.end(), keys_.begin(), keys_.end());
  }

 private:
  void push(int32_t query_end, int32_t key_end) {
    if (query_end == queries_.back() && key_end == keys_.back()) return;
    queries_.push_back(query_end);
    keys_.push_back(key_end);
  }

  static int32_t longest(const std::vector<int32_t>& offsets) {
    int32_t longest = 0;
    for (size_t i = 1; i < offsets.size(); ++i) {
      longest = std::max(longest, offsets[i] - offsets[i - 1]);
    }
    return longest;
  }

  std::vector<int32_t> queries_;
  std::vector<int32_t> keys_;
};

// Return the average of a token, rounded up; 0 without tokens.
int64_t per_token(int64_t sum, int64_t tokens) { return tokens == 0 ? 0 : ceil_div(sum, tokens); }

}  // namespace

int64_t Tree::longest_path() const {
  int64_t longest = 0;
  for (int32_t node = 0; node < size(); ++node) {
    longest = std::max<int64_t>(longest, positions[node] + length(node));
  }
  return longest;
}

int64_t Tree::mean_keys() const {
  int64_t pairs = 0;
  for (int32_t node = 0; node < size(); ++node) {
    const int64_t tokens = length(node);
    pairs += tokens * positions[node] + tokens * (tokens + 1) / 2;
  }
  return per_token(pairs, tokens());
}

int64_t Tree::mean_depth() const {
  int64_t sum = 0;
  for (int32_t node = 0; node < size(); ++node) sum += int64_t{length(node)} * depths[node];
  return per_token(sum, tokens());
}

int32_t Tree::deepest() const {
  return depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end());
}

std::vector<int32_t> Tree::path(int32_t sample) const {
  std::vector<int32_t> nodes;
  for (int32_t node = samples[sample]; node >= 0; node = parents[node]) nodes.push_back(node);
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

std::optional<Tree> tree_of_nodes(std::span<const int64_t> lengths,
                                  std::span<const int64_t> parents, std::string* why) {
  const auto size = static_cast<int32_t>(lengths.size());
  Tree tree;
  tree.begins.resize(size + 1, 0);
  tree.ends.resize(size);
  tree.parents.resize(size);
  tree.depths.resize(size);
  tree.positions.resize(size);
  std::vector<bool> is_leaf(size, true);
  std::vector<int32_t> path;  // from a root to the node before
  for (int32_t node = 0; node < size; ++node) {
    const int64_t parent = parents[node];
    while (!path.empty() && path.back() != parent) path.pop_back();
    if (parent != -1 && path.empty()) {
      *why = "got parents[" + std::to_string(node) + "] = " + std::to_string(parent);
      return std::nullopt;
    }
    tree.begins[node + 1] = tree.begins[node] + static_cast<int32_t>(lengths[node]);
    tree.parents[node] = static_cast<int32_t>(parent);
    tree.depths[node] = static_cast<int32_t>(path.size());
    if (parent >= 0) {
      tree.positions[node] = tree.positions[parent] + tree.length(static_cast<int32_t>(parent));
      is_leaf[parent] = false;
    }
    path.push_back(node);
  }
  for (int32_t node = size - 1; node >= 0; --node) {
    tree.ends[node] = std::max(tree.ends[node], tree.begins[node + 1]);
    const int32_t parent = tree.parents[node];
    if (parent >= 0) tree.ends[parent] = std::max(tree.ends[parent], tree.ends[node]);
    if (is_leaf[node]) tree.samples.push_back(node);
  }
  std::reverse(tree.samples.begin(), tree.samples.end());
  tree.context.assign(tree.samples.size(), 1);
  return tree;
}

Calls calls_of(const Tree& tree, int64_t max_seqs, int64_t max_depth, int64_t total_tokens) {
  const int32_t depth = tree.deepest();
  std::vector<Pairs> pairs(depth);
  for (int32_t node = 0; node < tree.size(); ++node) {
    const int32_t begin = tree.begins[node], end = tree.begins[node + 1];
    if (begin == end || end == tree.ends[node]) continue;
    pairs[tree.depths[node]].add(end, tree.ends[node], begin, end);
  }
  // Each node with descendants has at most three pairs, and each call one offset more than pairs
  // but no gaps before its first. At depth 1 a node with descendants has another node below it.
  const int64_t parents = std::min(max_depth == 1 ? max_seqs / 2 : max_seqs, total_tokens);
  Calls calls;
  calls.meta.resize(kTreeMetaHead + max_depth * kTreeCallSize, 0);
  calls.meta[kTreeDepth] = depth;
  calls.meta[kTreeLongestPath] = static_cast<int32_t>(tree.longest_path());
  calls.meta[kTreeMeanKeys] = static_cast<int32_t>(tree.mean_keys());
  calls.meta[kTreeMeanDepth] = static_cast<int32_t>(tree.mean_depth());
  calls.meta[kTreeNumNodes] = tree.size();
  calls.meta[kTreeNodeCapacity] = static_cast<int32_t>(max_seqs);
  calls.meta[kTreeOffsetsCapacity] = static_cast<int32_t>(3 * parents);
  calls.meta[kTreeMaxDepth] = static_cast<int32_t>(max_depth);
  for (int32_t d = 0; d < depth; ++d) {
    pairs[d].write(calls, calls.meta.data() + kTreeMetaHead + d * kTreeCallSize);
  }
  return calls;
}

}  // namespace cuseq::trees
