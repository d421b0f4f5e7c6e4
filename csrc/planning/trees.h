#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <tuple>

#include "cuseq/macros.h"
#include "trees/tree.h"

// Tensors about a tree (csrc/trees), all on the CPU. Python calls these functions as methods of
// `_C.Tree`.
namespace cuseq {

// Return the tree of nodes of these lengths and parents, int64, in the order of the row.
CUSEQ_API trees::Tree tree_of_nodes(const at::Tensor& lengths, const at::Tensor& parents);

// Set the last node of each sample's path, and the tokens at its start that are not targets. Every
// leaf must be the last node of a sample.
CUSEQ_API void set_tree_samples(trees::Tree& tree, std::span<const int64_t> samples,
                                std::span<const int64_t> context);

// Return the lengths of the nodes, int64.
CUSEQ_API at::Tensor tree_lengths(const trees::Tree& tree);

// Return the lengths of the samples, int64.
CUSEQ_API at::Tensor tree_sample_lengths(const trees::Tree& tree);

// Return the position of each token on its path, int32 [total_tokens]. The tail restarts at 0.
CUSEQ_API at::Tensor tree_positions(const trees::Tree& tree, int64_t total_tokens);

// Return tree_rows and tree_meta (csrc/trees/tree_meta.h), int32.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> tree_calls(const trees::Tree& tree, int64_t max_seqs,
                                                        int64_t max_depth, int64_t total_tokens);

// Return the rows of a sample's tokens, int64.
CUSEQ_API at::Tensor tree_rows_of(const trees::Tree& tree, int64_t sample);

// Return the rows of all samples, sample after sample, int64; then, for each token of the row, the
// places of its row in that list, int64, and their offsets, int32 [total_tokens + 1].
CUSEQ_API std::tuple<at::Tensor, at::Tensor, at::Tensor> tree_uses(const trees::Tree& tree,
                                                                   int64_t total_tokens);

// Return the rows that predict each sample's targets, the targets in `input_ids` (int64 [tokens]),
// and the number of targets of each sample, all int64.
CUSEQ_API std::tuple<at::Tensor, at::Tensor, at::Tensor> tree_targets(const trees::Tree& tree,
                                                                      const at::Tensor& input_ids);

}  // namespace cuseq
