#include <algorithm>
#include <unordered_map>
#include <utility>

#include "trees/tree.h"

namespace cuseq::trees {
namespace {

constexpr int32_t kNone = -1;

// A prefix tree whose edges are runs of tokens of the sequences.
class Trie {
 public:
  struct Node {
    int32_t parent;
    int32_t sequence;  // the node's tokens are [begin, end) of this sequence
    int64_t begin;
    int64_t end;
    std::vector<int32_t> children;  // in the order in which the sequences brought them
    bool ends_sequence = false;

    int64_t length() const { return end - begin; }
  };

  explicit Trie(std::span<const Sequence> sequences) : sequences_(sequences) {
    for (int32_t i = 0; i < static_cast<int32_t>(sequences.size()); ++i) insert(i);
  }

  // Return the sequences' nodes and the roots. Both change with later calls.
  const std::vector<int32_t>& last_nodes() const { return last_nodes_; }
  const std::vector<int32_t>& roots() const { return roots_; }
  const Node& node(int32_t i) const { return nodes_[i]; }
  int32_t size() const { return static_cast<int32_t>(nodes_.size()); }

 private:
  struct Step {
    int32_t node;
    int64_t token;
    int64_t key;
    bool operator==(const Step&) const = default;
  };
  struct HashStep {
    size_t operator()(const Step& step) const {
      uint64_t hash = static_cast<uint64_t>(step.token) * 0x9e3779b97f4a7c15u;
      hash = (hash ^ static_cast<uint64_t>(step.key)) * 0xc2b2ae3d27d4eb4fu;
      hash = (hash ^ static_cast<uint64_t>(step.node)) * 0x165667b19e3779f9u;
      return hash ^ (hash >> 29);
    }
  };

  Step step(int32_t node, int32_t sequence, int64_t place) const {
    const Sequence& one = sequences_[sequence];
    return {node, one.tokens[place], one.keys == nullptr ? 0 : one.keys[place]};
  }

  void insert(int32_t sequence) {
    const int64_t length = sequences_[sequence].length;
    int32_t parent = kNone;
    int64_t place = 0;
    while (place < length) {
      const auto found = steps_.find(step(parent, sequence, place));
      if (found == steps_.end()) {
        parent = add(parent, sequence, place, length);
        steps_[step(nodes_[parent].parent, sequence, place)] = parent;
        place = length;
        break;
      }
      int32_t child = found->second;
      const int64_t common = common_run(child, sequence, place);
      if (common < nodes_[child].length()) child = split(child, common);
      parent = child;
      place += common;
    }
    if (parent == kNone) parent = add(kNone, sequence, 0, 0);  // a sequence without tokens
    nodes_[parent].ends_sequence = true;
    last_nodes_.push_back(parent);
  }

  int32_t add(int32_t parent, int32_t sequence, int64_t begin, int64_t end) {
    const int32_t node = size();
    nodes_.push_back({parent, sequence, begin, end, {}});
    (parent == kNone ? roots_ : nodes_[parent].children).push_back(node);
    return node;
  }

  // Return how many tokens of a node continue a sequence at a place; at least one.
  int64_t common_run(int32_t node, int32_t sequence, int64_t place) const {
    const Node& one = nodes_[node];
    const Sequence& own = sequences_[one.sequence];
    const Sequence& other = sequences_[sequence];
    const int64_t most = std::min(one.length(), other.length - place);
    int64_t run = 1;
    const auto key = [](const Sequence& of, int64_t i) {
      return of.keys == nullptr ? 0 : of.keys[i];
    };
    while (run < most && own.tokens[one.begin + run] == other.tokens[place + run] &&
           key(own, one.begin + run) == key(other, place + run)) {
      ++run;
    }
    return run;
  }

  // Cut a node after `length` tokens; return the new node, which holds the first of them.
  int32_t split(int32_t node, int64_t length) {
    const int32_t upper = size();
    Node& lower = nodes_[node];
    const int32_t parent = lower.parent;
    Node first{parent, lower.sequence, lower.begin, lower.begin + length, {node}};
    steps_[step(parent, first.sequence, first.begin)] = upper;
    lower.begin += length;
    lower.parent = upper;
    steps_[step(upper, first.sequence, lower.begin)] = node;
    auto& siblings = parent == kNone ? roots_ : nodes_[parent].children;
    *std::ranges::find(siblings, node) = upper;
    nodes_.push_back(std::move(first));
    return upper;
  }

  std::span<const Sequence> sequences_;
  std::vector<Node> nodes_;
  std::vector<int32_t> roots_;
  std::vector<int32_t> last_nodes_;
  std::unordered_map<Step, int32_t, HashStep> steps_;
};

// A node of the trie that is to be written under a parent of the tree, with tokens before its own
// that its parents in the trie did not keep.
struct Task {
  int32_t node;
  int32_t parent;
  int64_t begin;
};

}  // namespace

SharedTree share_prefixes(std::span<const Sequence> sequences, int64_t min_shared) {
  const Trie trie(sequences);
  SharedTree shared;
  std::vector<int64_t> lengths;
  std::vector<int64_t> parents;
  std::vector<int32_t> written(trie.size(), kNone);  // the tree's node of a trie's node
  std::vector<Task> tasks;
  const auto push_children = [&](const std::vector<int32_t>& children, int32_t parent,
                                 int64_t repeated) {
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      tasks.push_back({*child, parent, trie.node(*child).begin - repeated});
    }
  };
  const auto write = [&](int32_t sequence, int64_t begin, int64_t end, int32_t parent) {
    lengths.push_back(end - begin);
    parents.push_back(parent);
    shared.sources.push_back({sequence, begin});
    return static_cast<int32_t>(lengths.size()) - 1;
  };
  push_children(trie.roots(), kNone, 0);
  while (!tasks.empty()) {
    const Task task = tasks.back();
    tasks.pop_back();
    const Trie::Node& node = trie.node(task.node);
    const int64_t length = node.end - task.begin;
    if (node.children.empty() || length >= min_shared) {
      written[task.node] = write(node.sequence, task.begin, node.end, task.parent);
      push_children(node.children, written[task.node], 0);
      continue;
    }
    // Too short to share: each branch repeats the tokens.
    if (node.ends_sequence) {
      written[task.node] = write(node.sequence, task.begin, node.end, task.parent);
    }
    push_children(node.children, task.parent, length);
  }
  std::string why;
  shared.tree = *tree_of_nodes(lengths, parents, &why);
  shared.tree.samples.clear();
  for (const int32_t last : trie.last_nodes()) shared.tree.samples.push_back(written[last]);
  shared.tree.context.clear();
  for (const Sequence& one : sequences) {
    shared.tree.context.push_back(one.length == 0 ? 0 : 1);
  }
  return shared;
}

}  // namespace cuseq::trees
