#pragma once

#include <ATen/core/Tensor.h>

#include "cuseq/macros.h"

// The loops of the gated delta rule over the chunks of documents that are computed side by side
// (python/cuseq/integrations/transformers/hybrids/delta_rule.py): 64 tokens of a head a chunk, `n`
// chunks times heads, first the first chunk of each document, then the second ones, and so on.
// `counts` says of how many documents. In C++ because each step launches a few kernels on slices,
// which take Python longer to make than the GPU to run.
namespace cuseq {

struct DeltaRuleChunks {
  at::Tensor reads;   // [n, 64, key_dim], times the state before a chunk, what its values lose
  at::Tensor writes;  // [n, 64, key_dim], where a chunk's new values go in the state
  at::Tensor decay;   // [n, 1, 1], of the state over the chunk
  at::IntArrayRef counts;
  int64_t heads;
};

// Subtract what each chunk reads of its state from `values` [n, 64, value_dim], which become what
// it writes. Return the states before all chunks, [n, key_dim, value_dim].
CUSEQ_API at::Tensor delta_rule_states(const DeltaRuleChunks& chunks, const at::Tensor& values);

// Gradients, updated in place: [n, key_dim, value_dim], [n, 64, value_dim], [n, 64, key_dim], and
// [n, 64], of the sums of the logarithms of decay.
struct DeltaRuleGradients {
  at::Tensor states;
  at::Tensor values;
  at::Tensor writes;
  at::Tensor decayed;
};

// Carry the gradients of states along the chunks, from the last ones to the first.
CUSEQ_API void delta_rule_gradients(const DeltaRuleChunks& chunks, const at::Tensor& states,
                                    const at::Tensor& values, const DeltaRuleGradients& gradients);

}  // namespace cuseq
