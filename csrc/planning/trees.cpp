#include "planning/trees.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "planning/checks.h"

namespace cuseq {
namespace {

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

std::span<const int64_t> span_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), static_cast<size_t>(tensor.numel())};
}

// Return zeros whose memory is touched only where somebody writes: capacities may be far larger
// than what is used.
Tensor lazy_zeros(int64_t size) {
  const auto count = static_cast<size_t>(std::max<int64_t>(size, 1));
  void* memory = std::calloc(count, sizeof(int32_t));
  TORCH_CHECK(memory != nullptr, "out of memory for ", size, " entries of a tree");
  return at::from_blob(memory, {size}, [](void* own) { std::free(own); }, at::kInt);
}

// Call visit(first token, length) for each node of a sample's path.
template <typename F>
void for_each_run(const trees::Tree& tree, int32_t sample, const F& visit) {
  for (const int32_t node : tree.path(sample)) visit(tree.begins[node], tree.length(node));
}

void check_total(const trees::Tree& tree, int64_t total_tokens) {
  TORCH_CHECK_VALUE(tree.tokens() <= total_tokens && total_tokens <= kMostTokens,
                    "total_tokens must be at least the ", tree.tokens(),
                    " tokens of the tree and below 2^31, got ", total_tokens);
}

int64_t total_path_length(const trees::Tree& tree) {
  int64_t total = 0;
  for (int32_t i = 0; i < tree.num_samples(); ++i) total += tree.path_length(i);
  return total;
}

}  // namespace

trees::Tree tree_of_nodes(const Tensor& lengths, const Tensor& parents) {
  check_host_vector(lengths, "lengths");
  check_host_vector(parents, "parents");
  TORCH_CHECK_VALUE(lengths.numel() == parents.numel(),
                    "parents must have an entry for each of the ", lengths.numel(), " nodes, got ",
                    parents.numel());
  const Tensor own_lengths = host_values(lengths);
  const Tensor own_parents = host_values(parents);
  check_length_values(own_lengths, std::numeric_limits<int32_t>::max());
  std::string why;
  auto tree = trees::tree_of_nodes(span_of(own_lengths), span_of(own_parents), &why);
  TORCH_CHECK_VALUE(tree.has_value(),
                    "parents must name -1 or a node on the path to the node before, since a "
                    "node's descendants follow it in the row, ",
                    why);
  return *std::move(tree);
}

void set_tree_samples(trees::Tree& tree, std::span<const int64_t> samples,
                      std::span<const int64_t> context) {
  TORCH_CHECK_VALUE(samples.size() < std::numeric_limits<int32_t>::max(),
                    "samples must be fewer than 2^31 - 1, got ", samples.size());
  TORCH_CHECK_VALUE(context.size() == samples.size(), "context must have a number for each of the ",
                    samples.size(), " samples, got ", context.size());
  std::vector<bool> is_passed(tree.size(), false);  // whether a sample ends at it or below it
  tree.samples.clear();
  tree.context.clear();
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t node = samples[i];
    TORCH_CHECK_VALUE(0 <= node && node < tree.size(), "samples must name nodes in [0, ",
                      tree.size(), "), got samples[", i, "] = ", node);
    tree.samples.push_back(static_cast<int32_t>(node));
    is_passed[node] = true;
    const int64_t length = tree.path_length(static_cast<int32_t>(i));
    TORCH_CHECK_VALUE(0 <= context[i] && context[i] <= std::max<int64_t>(length, 1),
                      "context must lie within each sample, of ", length, " tokens, got context[",
                      i, "] = ", context[i]);
    tree.context.push_back(static_cast<int32_t>(context[i]));
  }
  for (int32_t node = tree.size() - 1; node >= 0; --node) {
    TORCH_CHECK_VALUE(is_passed[node], "samples must name every leaf, got none through node ",
                      node);
    if (tree.parents[node] >= 0) is_passed[tree.parents[node]] = true;
  }
}

Tensor tree_lengths(const trees::Tree& tree) {
  std::vector<int64_t> lengths(tree.size());
  for (int32_t node = 0; node < tree.size(); ++node) lengths[node] = tree.length(node);
  return tensor_of(std::move(lengths));
}

Tensor tree_sample_lengths(const trees::Tree& tree) {
  std::vector<int64_t> lengths(tree.num_samples());
  for (int32_t i = 0; i < tree.num_samples(); ++i) lengths[i] = tree.path_length(i);
  return tensor_of(std::move(lengths));
}

Tensor tree_positions(const trees::Tree& tree, int64_t total_tokens) {
  check_total(tree, total_tokens);
  Tensor positions = at::empty({total_tokens}, at::kInt);
  auto* out = positions.mutable_data_ptr<int32_t>();
  for (int32_t node = 0; node < tree.size(); ++node) {
    std::iota(out + tree.begins[node], out + tree.begins[node + 1], tree.positions[node]);
  }
  std::iota(out + tree.tokens(), out + total_tokens, 0);
  return positions;
}

std::tuple<Tensor, Tensor> tree_calls(const trees::Tree& tree, int64_t max_seqs, int64_t max_depth,
                                      int64_t total_tokens) {
  TORCH_INTERNAL_ASSERT(tree.size() <= max_seqs && tree.deepest() <= max_depth);
  trees::Calls calls = trees::calls_of(tree, max_seqs, max_depth, total_tokens);
  TORCH_CHECK_VALUE(
      calls.node_capacity() + 2 * calls.offsets_capacity() < std::numeric_limits<int32_t>::max(),
      "max_seqs must leave room for the offsets of a tree, below 2^31 / 7, got ", max_seqs);
  Tensor rows = lazy_zeros(calls.node_capacity() + 2 * calls.offsets_capacity());
  auto* to = rows.mutable_data_ptr<int32_t>();
  std::ranges::copy(tree.ends, to);
  std::ranges::copy(calls.queries, to + calls.node_capacity());
  std::ranges::copy(calls.keys, to + calls.node_capacity() + calls.offsets_capacity());
  return {rows, tensor_of(std::move(calls.meta))};
}

Tensor tree_rows_of(const trees::Tree& tree, int64_t sample) {
  TORCH_CHECK_VALUE(0 <= sample && sample < tree.num_samples(), "i must lie in [0, ",
                    tree.num_samples(), "), the number of samples, got ", sample);
  std::vector<int64_t> rows;
  for_each_run(tree, static_cast<int32_t>(sample), [&](int64_t begin, int64_t length) {
    for (int64_t token = begin; token < begin + length; ++token) rows.push_back(token);
  });
  return tensor_of(std::move(rows));
}

std::tuple<Tensor, Tensor, Tensor> tree_uses(const trees::Tree& tree, int64_t total_tokens) {
  check_total(tree, total_tokens);
  std::vector<int32_t> samples(tree.size(), 0);  // through each node
  for (const int32_t last : tree.samples) ++samples[last];
  for (int32_t node = tree.size() - 1; node >= 0; --node) {
    if (tree.parents[node] >= 0) samples[tree.parents[node]] += samples[node];
  }
  const int64_t total = total_path_length(tree);
  TORCH_CHECK_VALUE(total <= kMostTokens,
                    "samples must have at most 2^31 - 1 tokens together, got ", total);
  Tensor rows = at::empty({total}, at::kLong);
  Tensor places = at::empty({total}, at::kLong);
  Tensor offsets = at::empty({total_tokens + 1}, at::kInt);
  auto* row = rows.mutable_data_ptr<int64_t>();
  auto* place = places.mutable_data_ptr<int64_t>();
  auto* offset = offsets.mutable_data_ptr<int32_t>();
  offset[0] = 0;
  for (int32_t node = 0; node < tree.size(); ++node) {
    for (int32_t t = tree.begins[node]; t < tree.begins[node + 1]; ++t) {
      offset[t + 1] = offset[t] + samples[node];
    }
  }
  std::fill(offset + tree.tokens() + 1, offset + total_tokens + 1, offset[tree.tokens()]);
  std::vector<int32_t> seen(tree.size(), 0);  // samples before this one, by node
  int64_t at = 0;
  for (int32_t i = 0; i < tree.num_samples(); ++i) {
    for (const int32_t node : tree.path(i)) {
      for (int32_t t = tree.begins[node]; t < tree.begins[node + 1]; ++t, ++at) {
        row[at] = t;
        place[offset[t] + seen[node]] = at;
      }
      ++seen[node];
    }
  }
  return {rows, places, offsets};
}

std::tuple<Tensor, Tensor, Tensor> tree_targets(const trees::Tree& tree, const Tensor& input_ids) {
  check_host_vector(input_ids, "input_ids");
  TORCH_CHECK_VALUE(input_ids.scalar_type() == at::kLong && input_ids.is_contiguous() &&
                        input_ids.numel() >= tree.tokens(),
                    "input_ids must be contiguous int64 with at least the ", tree.tokens(),
                    " tokens of the tree, got ", dtype_name(input_ids.scalar_type()), " ",
                    input_ids.sizes());
  std::vector<int64_t> lengths(tree.num_samples());
  int64_t total = 0;
  for (int32_t i = 0; i < tree.num_samples(); ++i) {
    lengths[i] = std::max<int64_t>(0, tree.path_length(i) - std::max(1, tree.context[i]));
    total += lengths[i];
  }
  Tensor rows = at::empty({total}, at::kLong);
  Tensor labels = at::empty({total}, at::kLong);
  auto* row = rows.mutable_data_ptr<int64_t>();
  auto* label = labels.mutable_data_ptr<int64_t>();
  const auto* ids = input_ids.const_data_ptr<int64_t>();
  for (int32_t i = 0; i < tree.num_samples(); ++i) {
    int64_t left_out = std::max(1, tree.context[i]);
    int64_t before = 0;  // row of the previous token of the path
    for_each_run(tree, i, [&](int64_t begin, int64_t length) {
      for (int64_t token = begin; token < begin + length; before = token++) {
        if (left_out > 0) {
          --left_out;
          continue;
        }
        *row++ = before;
        *label++ = ids[token];
      }
    });
  }
  return {rows, labels, tensor_of(std::move(lengths))};
}

}  // namespace cuseq
