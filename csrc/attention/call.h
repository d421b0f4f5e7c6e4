#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/types.h"

// One call of attention: rows of queries against rows of keys, sequence by sequence. Compositions
// make calls, backends answer them, and neither knows the other.
namespace cuseq::attention {

// The sequences of the queries, or of the keys.
struct Sequences {
  Tensor offsets;       // int32 [n_seqs + 1] beside the rows, ascending and inside them
  Tensor cu_seqlens;    // what the caller gave the offsets in: a key of what is known on the host
  int64_t longest = 0;  // exact, or a bound where only the device knows
  OptionalInt num_real_tokens;  // the last offset; none where only the device knows

  int64_t count() const { return offsets.size(0) - 1; }
};

struct Call {
  Tensor q;  // [tokens, heads, head_dim]
  Tensor k;  // [keys, key_heads, head_dim]; heads are a multiple of key_heads
  Tensor v;  // [keys, key_heads, value_dim]
  Sequences queries;
  Sequences keys;  // as many as queries, each seen by the queries of its number
  bool causal = true;
  OptionalInt window;    // keys that a query sees, itself included; none where all fit
  OptionalTensor spans;  // int32 [n_spans, 2], seen whole by their own tokens
  double scale = 1.0;

  // True where queries and keys are the tokens of the same row.
  bool is_of_one_row() const { return queries.offsets.is_same(keys.offsets); }
};

// out is contiguous [tokens, heads, value_dim], logsumexp [heads, tokens] in fp32 (fp64 for fp64
// inputs). Both are zero on tokens after the last sequence, and so are gradients, which are
// contiguous too.
using Output = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// What the gradient of a call needs beside the call itself. out and logsumexp may be those of
// several calls, merged.
struct Outer {
  Tensor grad_out;
  Tensor out;
  Tensor logsumexp;
};

// Answer a call with the first backend that takes it.
Output attend(const Call& call);
Gradients attend_backward(const Call& call, const Outer& outer);

}  // namespace cuseq::attention
