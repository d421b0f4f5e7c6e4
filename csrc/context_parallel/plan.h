#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "context_parallel/cost.h"
#include "context_parallel/deal.h"
#include "cuseq/macros.h"

namespace cuseq::cp {

enum class Policy { kAuto, kContiguous, kUlysses, kZigzag };

struct Options {
  int64_t cp_size = 1;
  Policy policy = Policy::kAuto;
  int64_t heads = 1;
  int64_t key_heads = 1;
  int64_t window = 0;                   // 0: all keys
  std::optional<int64_t> max_far_rows;  // of a rank; none: no limit
};

// Which tokens each rank holds, and what that costs. A plan is a pure function of row and options.
struct Plan {
  Row row;
  Options options;
  Deal deal;
  Costs costs;
  int64_t num_whole = 0;  // documents with tokens that one rank holds
  int64_t num_cut = 0;
  uint64_t hash = 0;  // of row, deal and everything else that ranks must agree on

  int64_t tokens_per_rank() const { return row.total_tokens / options.cp_size; }

  // Return the tokens of all ranks, rank after rank, as indices of the row.
  CUSEQ_API std::vector<int32_t> tokens() const;

  // Return the length of each piece of a rank in its order, without padding and empty pieces.
  CUSEQ_API std::vector<int32_t> piece_lengths(int64_t rank) const;
};

// The row must have segments that the policy can deal: a multiple of cp_size tokens in total, and
// for zigzag multiples of 2 * cp_size. "auto" takes the least time among the deals whose busiest
// rank has at most 1.05 times the mean of the pairs, or among all if there are none; deals with
// more than max_far_rows are left out as long as there are others.
CUSEQ_API Plan make_plan(Row row, const Options& options);

}  // namespace cuseq::cp
