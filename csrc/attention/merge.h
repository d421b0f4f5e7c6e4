#pragma once

#include "attention/call.h"

// The sum of what several attention calls over parts of the keys computed. Given the merged out and
// logsumexp, the backward of each call is exact, and its gradients are terms of a sum.
namespace cuseq::attention {

// Merge the results of a call of two rows into out [tokens, heads, value_dim], of the call's dtype
// or fp32, and logsumexp [heads, tokens], in place. Only queries with keys change, and they are
// among the first rows.
void merge(const Tensor& out, const Tensor& logsumexp, const Call& call, const Output& part);

// Add the gradients `part` of a call's rows to the first rows of `sum`, in place, where the rows
// `own` have others in `other`: a sum of the call's dtype or fp32, added in fp32 (fp64 for fp64).
void add(const Tensor& sum, const Tensor& part, const Sequences& own, const Sequences& other);

}  // namespace cuseq::attention
