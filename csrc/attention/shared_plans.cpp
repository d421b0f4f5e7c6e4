#include "attention/shared_plans.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <set>

#include "cuseq/seqlens.h"
#include "ops/checks.h"

namespace cuseq::attention {
namespace {

std::atomic<int64_t> made{0};

// Round up to a number of at most so many significant binary digits, a multiple of `least`.
int64_t round_up_to_digits(int64_t value, int digits, int64_t least) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value)));
  return round_up(value, std::max(power >> digits, least));
}

}  // namespace

PlanSizes plan_sizes(int64_t sequences, int64_t longest, int64_t tokens) {
  constexpr int64_t kTile = 128;  // of queries and of keys
  PlanSizes sizes;
  sizes.sequences = round_up_to_digits(sequences, 3, 4);
  sizes.longest = round_up_to_digits(longest, 2, kTile);
  sizes.longest = std::min(sizes.longest, round_up(std::max(longest, tokens), kTile));
  sizes.tokens = round_up_to_digits(tokens, 3, 512);
  return sizes;
}

// Measured on an H200 (torch 2.15, cuDNN 9.26): 1.3 us for 1,000 tokens of 16 heads of 128. The
// table's rows have lognormal lengths, the longest of n about 1 + log2(n) times their mean.
double extra_us_of_plan(const Call& call) {
  constexpr double kUsPerElement = 1.3e-3 / (16 * 128);
  if (call.queries.count() == 0) return 0;
  const auto sizes = plan_sizes(call.queries.count(), call.queries.longest, call.q.size(0));
  const auto tokens = static_cast<double>(call.q.size(0));
  const double usual = tokens * std::bit_width(static_cast<uint64_t>(call.queries.count()));
  const double padded = static_cast<double>(sizes.sequences * sizes.longest);
  return std::max(0.0, padded - usual) * kUsPerElement *
         static_cast<double>(call.q.size(1) * call.q.size(2));
}

void count_plan(const PlanKey& key) {
  thread_local std::set<PlanKey> used;
  if (used.insert(key).second) made.fetch_add(1, std::memory_order_relaxed);
}

int64_t plans_made() { return made.load(std::memory_order_relaxed); }

#ifndef CUSEQ_WITH_CUDA
std::string why_no_cudnn(int64_t /*sm*/) { return "this cuseq was built without the CUDA kernels"; }
#endif

}  // namespace cuseq::attention
