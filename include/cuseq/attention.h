#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "cuseq/macros.h"

// Attention inside each sequence of a packed row, for programs that load libcuseq without Python.
// What the options mean, and their errors, are those of cuseq.varlen_attention in Python.
namespace cuseq {

struct AttentionOptions {
  at::Tensor cu_seqlens;                // int32 [n_seqs + 1], on q's device
  std::optional<at::Tensor> host_meta;  // of a PackedLayout; without it the device is asked
  bool causal = true;
  std::optional<int64_t> window;  // keys that a query sees, itself included
  std::optional<double> scale;
  std::optional<c10::SymInt> max_seqlen_bound;
  std::optional<at::Tensor> spans;              // int32 [n_spans, 2]
  std::optional<at::Tensor> cu_seqlens_padded;  // where segments start, if longer than sequences
};

// q [tokens, heads, head_dim], k and v [tokens, key heads, head_dim]. Returns out and logsumexp
// [heads, tokens].
CUSEQ_API std::tuple<at::Tensor, at::Tensor> varlen_attention(const at::Tensor& q,
                                                              const at::Tensor& k,
                                                              const at::Tensor& v,
                                                              const AttentionOptions& options);

}  // namespace cuseq
