#pragma once

#include <cstdint>
#include <vector>

#include "context_parallel/deal.h"

// The work and the traffic of a deal. One unit of cost is one query-key pair of all heads, forward
// and backward, so that deals are compared by integers.
namespace cuseq::cp {

struct CostModel {
  int64_t window = 0;    // keys that a token sees, itself included; 0: all
  int64_t row_cost = 1;  // cost of receiving the keys and values of one token

  // The model for a layer with these heads. It assumes 300 TFLOP/s of attention and 300 GB/s of
  // NVLink: a pair is 4 * heads * head_dim operations forward and 2.5 times those backward; a row
  // of bf16 keys and values travels in the forward, again in the backward (few are kept instead),
  // and its gradients return. head_dim cancels out.
  static CostModel of_heads(int64_t heads, int64_t key_heads, int64_t window);
};

// The work of a whole document.
struct Work {
  int64_t pairs;
  int64_t tiled_pairs;
};

struct Costs {
  int64_t pairs = 0;      // query-key pairs of all ranks
  int64_t max_pairs = 0;  // of the busiest rank
  int64_t far_rows = 0;   // rows of keys and values that ranks receive, together
  int64_t max_far_rows = 0;
  int64_t time = 0;  // cost of the slowest rank
};

// Return the query-key pairs of the queries [begin, end) of a document under causal attention.
CUSEQ_API int64_t pairs_of(int64_t begin, int64_t end, int64_t window);

// Return the pairs that flash attention computes for them: it works in tiles of 128 queries and 64
// keys.
CUSEQ_API int64_t tiled_pairs_of(int64_t begin, int64_t end, int64_t window);

// Return the first key that the queries from `begin` on need.
inline int64_t first_key(int64_t begin, int64_t window) {
  return window == 0 || begin < window ? 0 : begin - window + 1;
}

std::vector<Work> work_of_documents(const Row& row, int64_t window);

// Return the costs if ranks exchange far keys. Whole documents run meanwhile, cut pieces after the
// exchange over a copy of all their keys.
Costs exchange_costs(const Row& row, const std::vector<Work>& work, const Deal& deal,
                     const CostModel& model);

// Return the costs of Ulysses: ranks exchange heads, and each computes its heads of the whole row.
Costs ulysses_costs(const Row& row, const std::vector<Work>& work, int64_t cp_size, int64_t heads,
                    int64_t key_heads, const CostModel& model);

}  // namespace cuseq::cp
