#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "planning/checks.h"
#include "planning/trees.h"
#include "python/bindings.h"
#include "python/tokens.h"

namespace cuseq::python {
namespace {

using trees::Tree;

struct TreeMetaSlots {};

// Bind the slots as plain ints on a class (`_C.TreeMeta.DEPTH`), which torch.compile reads as
// constants.
void bind_tree_meta_slots(py::module_& m) {
  py::class_<TreeMetaSlots> slots(m, "TreeMeta", "What each entry of a tree's meta holds.");
  slots.attr("DEPTH") = static_cast<int>(kTreeDepth);
  slots.attr("LONGEST_PATH") = static_cast<int>(kTreeLongestPath);
  slots.attr("MEAN_KEYS") = static_cast<int>(kTreeMeanKeys);
  slots.attr("MEAN_DEPTH") = static_cast<int>(kTreeMeanDepth);
  slots.attr("NUM_NODES") = static_cast<int>(kTreeNumNodes);
  slots.attr("NODE_CAPACITY") = static_cast<int>(kTreeNodeCapacity);
  slots.attr("OFFSETS_CAPACITY") = static_cast<int>(kTreeOffsetsCapacity);
  slots.attr("MAX_DEPTH") = static_cast<int>(kTreeMaxDepth);
}

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

using TreeAndTokens = std::tuple<Tree, at::Tensor>;

// Return a row for `used` tokens, with zeros behind them.
at::Tensor row_for(int64_t used, std::optional<int64_t> total_tokens) {
  const int64_t total = total_tokens.value_or(used);
  TORCH_CHECK_VALUE(total <= kMostTokens, "total_tokens must be at most 2^31 - 1, got ", total);
  TORCH_CHECK_VALUE(used <= total, "total_tokens must be at least the ", used,
                    " tokens of the tree, got ", total);
  at::Tensor row = at::empty({total}, at::kLong);
  row.narrow(0, used, total - used).zero_();
  return row;
}

// Return the nodes of groups, a prompt and its completions each, and their tokens.
TreeAndTokens tree_of_groups(py::handle prompts, py::handle completions,
                             std::optional<int64_t> total_tokens) {
  std::vector<Tokens> nodes;
  std::vector<int64_t> parents;
  std::vector<int32_t> context;
  auto sources = token_lists(prompts, "prompts");
  int64_t group = 0;
  auto lists = iterate(completions, "completions", "a list of lists of token sequences");
  for (; lists != py::iterator::sentinel(); ++lists) {
    TORCH_CHECK_VALUE(group < static_cast<int64_t>(sources.size()),
                      "completions must have a list for each of the ", sources.size(),
                      " prompts, got more");
    auto own = token_lists(*lists, "completions[" + std::to_string(group) + "]");
    const auto prompt = static_cast<int64_t>(nodes.size());
    nodes.push_back(std::move(sources[group++]));
    parents.push_back(-1);
    TORCH_CHECK_VALUE(!own.empty(), "completions[", group - 1,
                      "] must have at least one completion, got none");
    for (Tokens& one : own) {
      nodes.push_back(std::move(one));
      parents.push_back(prompt);
      context.push_back(static_cast<int32_t>(nodes[prompt].size()));
    }
  }
  TORCH_CHECK_VALUE(group == static_cast<int64_t>(sources.size()),
                    "completions must have a list for each of the ", sources.size(),
                    " prompts, got ", group);
  std::vector<int64_t> lengths(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) lengths[i] = static_cast<int64_t>(nodes[i].size());
  at::Tensor row =
      row_for(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), total_tokens);
  auto* to = row.mutable_data_ptr<int64_t>();
  for (const Tokens& node : nodes) to = std::ranges::copy(node, to).out;
  Tree tree = tree_of_nodes(tensor_of(std::move(lengths)), tensor_of(std::move(parents)));
  tree.context = std::move(context);
  return {std::move(tree), row};
}

// Return the tree that shares the sequences' prefixes, and its tokens.
TreeAndTokens tree_of_sequences(py::handle sequences, py::handle keys, int64_t min_shared,
                                std::optional<int64_t> total_tokens) {
  const auto tokens = token_lists(sequences, "sequences");
  int64_t total = 0;
  for (const Tokens& one : tokens) total += static_cast<int64_t>(one.size());
  TORCH_CHECK_VALUE(total <= kMostTokens,
                    "sequences must have at most 2^31 - 1 tokens together, got ", total);
  std::vector<Tokens> key_lists;
  if (!keys.is_none()) {
    key_lists = token_lists(keys, "keys");
    TORCH_CHECK_VALUE(key_lists.size() == tokens.size(), "keys must have a list for each of the ",
                      tokens.size(), " sequences, got ", key_lists.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      TORCH_CHECK_VALUE(key_lists[i].size() == tokens[i].size(), "keys[", i,
                        "] must have a key for each of the ", tokens[i].size(), " tokens, got ",
                        key_lists[i].size());
    }
  }
  std::vector<trees::Sequence> spans;
  for (size_t i = 0; i < tokens.size(); ++i) {
    spans.push_back({tokens[i].data(), keys.is_none() ? nullptr : key_lists[i].data(),
                     static_cast<int64_t>(tokens[i].size())});
  }
  const py::gil_scoped_release released;
  trees::SharedTree shared = trees::share_prefixes(spans, min_shared);
  at::Tensor row = row_for(shared.tree.tokens(), total_tokens);
  auto* to = row.mutable_data_ptr<int64_t>();
  for (int32_t node = 0; node < shared.tree.size(); ++node) {
    const auto& source = shared.sources[node];
    const int64_t* from = spans[source.sequence].tokens + source.begin;
    to = std::copy(from, from + shared.tree.length(node), to);
  }
  return {std::move(shared.tree), row};
}

// Return what makes the same tree again: lengths, parents, samples and context.
py::tuple parts_of(const Tree& tree) {
  std::vector<int64_t> lengths(tree.size());
  for (int32_t i = 0; i < tree.size(); ++i) lengths[i] = tree.length(i);
  return py::make_tuple(lengths, tree.parents, tree.samples, tree.context);
}

Tree tree_of_parts(py::handle lengths, py::handle parents, py::handle samples, py::handle context) {
  Tree tree = tree_of_nodes(tensor_of(token_list(lengths, "lengths")),
                            tensor_of(token_list(parents, "parents")));
  set_tree_samples(tree, token_list(samples, "samples"), token_list(context, "context"));
  return tree;
}

}  // namespace

void bind_trees(py::module_& m) {
  bind_tree_meta_slots(m);
  py::class_<Tree>(m, "Tree", "Which tokens of a row follow which.")
      .def("lengths", &tree_lengths, Released())
      .def("sample_lengths", &tree_sample_lengths, Released())
      .def("positions", &tree_positions, Released())
      .def("calls", &tree_calls, Released())
      .def("rows_of", &tree_rows_of, Released())
      .def("uses", &tree_uses, Released())
      .def("targets", &tree_targets, Released())
      .def_property_readonly("num_nodes", &Tree::size)
      .def_property_readonly("num_samples", &Tree::num_samples)
      .def_property_readonly("num_tokens", &Tree::tokens)
      .def_property_readonly("depth", &Tree::deepest)
      .def_property_readonly("longest_path", &Tree::longest_path)
      .def("parts", &parts_of);
  m.def("tree_of_parts", &tree_of_parts);
  m.def("tree_of_nodes", &tree_of_nodes, Released());
  m.def("tree_of_groups", &tree_of_groups);
  m.def("tree_of_sequences", &tree_of_sequences);
}

}  // namespace cuseq::python
