#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "cuseq/macros.h"

// Attention within each sequence of a packed row, for programs that load libcuseq without Python.
// The options and the errors are those of cuseq.varlen_attention in Python, which adds sinks and
// the backend "flex".
namespace cuseq {

struct AttentionOptions {
  at::Tensor cu_seqlens;  // int32 [n_seqs + 1], on q's device
  // Of a PackedLayout. Without it, offsets on a GPU are not known on the host: kernels get a bound
  // on the longest length, and attention that runs sequence by sequence synchronises.
  std::optional<at::Tensor> host_meta;
  bool causal = true;
  std::optional<int64_t> window;  // keys that a query sees, including itself
  std::optional<double> scale;
  std::optional<c10::SymInt> max_seqlen_bound;
  std::optional<at::Tensor> spans;              // int32 [n_spans, 2]
  std::optional<at::Tensor> cu_seqlens_padded;  // segment starts, if segments are padded
  std::optional<double> softcap;                // scores become softcap * tanh(score / softcap)
  std::string backend = "auto";                 // or the name of the backend that must run
  // Of a layout that is a rank's part of a row (cp_partition): the rank's share of the plan, and
  // the name of the process group of its ranks.
  std::optional<at::Tensor> rank_rows;
  std::optional<at::Tensor> rank_meta;
  std::string rank_group;
  // Of a layout of a tree, for rows whose samples share prefixes: int32, on q's device and on the
  // CPU.
  std::optional<at::Tensor> tree_rows;
  std::optional<at::Tensor> tree_meta;
};

// Compute attention of q [tokens, heads, head_dim] over k and v [tokens, key heads, head_dim].
// Return out and logsumexp [heads, tokens].
CUSEQ_API std::tuple<at::Tensor, at::Tensor> varlen_attention(const at::Tensor& q,
                                                              const at::Tensor& k,
                                                              const at::Tensor& v,
                                                              const AttentionOptions& options);

}  // namespace cuseq
