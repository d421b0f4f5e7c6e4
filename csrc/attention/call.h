#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "cuseq/macros.h"
#include "ops/types.h"

// One attention call: rows of queries against rows of keys, sequence by sequence. Compositions make
// calls and backends execute them; neither knows the other.
namespace cuseq::attention {

// The sequences of the queries or of the keys.
struct Sequences {
  Tensor offsets;               // int32 [n_seqs + 1] on the rows' device, ascending and inside them
  Tensor cu_seqlens;            // tensor the caller gave; the cache key of host copies
  int64_t first = 0;            // index of offsets[0] in cu_seqlens
  int64_t longest = 0;          // exact, or a bound if only the device knows it
  OptionalInt num_real_tokens;  // the last offset; none if only the device knows it

  int64_t count() const { return offsets.size(0) - 1; }
};

// Queries and keys are the tokens of one row, or lie in two rows. In two rows query i of a pair of
// n queries and m keys stands at key m - n + i: a causal call ends there and a window counts from
// there. A pair may have no queries or no keys; a causal one has at least as many keys as queries,
// or none.
struct Call {
  Tensor q;  // [tokens, heads, head_dim]
  Tensor k;  // [keys, key_heads, head_dim]; heads are a multiple of key_heads
  Tensor v;  // [keys, key_heads, value_dim]
  Sequences queries;
  Sequences keys;  // as many as queries; queries of sequence i see keys of sequence i
  bool causal = true;
  OptionalInt window;    // keys that a query sees, including itself; none: all
  OptionalTensor spans;  // int32 [n_spans, 2]; their tokens see the whole span
  double scale = 1.0;
  OptionalDouble softcap;        // scores become softcap * tanh(score / softcap)
  std::string backend = "auto";  // or the name of the backend that must execute the call
  bool all_have_keys = false;    // in two rows: every sequence of queries is known to have keys

  // Return whether queries and keys are the tokens of the same row.
  bool is_of_one_row() const { return queries.offsets.is_same(keys.offsets); }
  // Return whether there may be queries without keys.
  bool may_lack_keys() const { return !is_of_one_row() && !all_have_keys; }
  // Return the kind of the mask, as the measurements name it.
  const char* mask() const {
    if (softcap.has_value()) return "softcap";
    if (spans.has_value()) return "spans";
    if (window.has_value()) return causal ? "window" : "two_sided";
    return causal ? "causal" : "full";
  }
  // Return what most kernels have not and the call asks for, or null.
  const char* extra() const {
    if (spans.has_value()) return "spans";
    return softcap.has_value() ? "soft cap with a backward" : nullptr;
  }
};

// out is contiguous [tokens, heads, value_dim]; logsumexp is [heads, tokens] in fp32 (fp64 for fp64
// inputs); gradients are contiguous. All are zero on tokens after the last sequence. A query
// without keys has out 0, logsumexp -inf and gradient 0.
using Output = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// The inputs of a backward besides the call itself. out and logsumexp may be merged from several
// calls.
struct Outer {
  Tensor grad_out;
  Tensor out;
  Tensor logsumexp;
};

// Execute a call with the backend that choice.h names.
CUSEQ_API Output attend(const Call& call);
CUSEQ_API Gradients attend_backward(const Call& call, const Outer& outer);

}  // namespace cuseq::attention
