#include "attention/measured.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "ops/checks.h"

#ifdef CUSEQ_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace cuseq::attention {
namespace {

// Readers hold pointers into it without a lock, so a table that was replaced is never freed. A
// process loads one; only tests load more.
std::atomic<const std::vector<Measured>*>& table() {
  static std::atomic<const std::vector<Measured>*> rows{new std::vector<Measured>()};
  return rows;
}

double ratio(int64_t one, int64_t other) {
  const auto at_least_one = [](int64_t size) {
    return static_cast<double>(std::max<int64_t>(size, 1));
  };
  return std::abs(std::log2(at_least_one(one) / at_least_one(other)));
}

int64_t mean_length(const Facts& facts) {
  return facts.tokens / std::max<int64_t>(facts.sequences, 1);
}

// The head dimension decides which tiles a kernel has, so it counts more than the sizes.
double distance(const Facts& one, const Facts& other) {
  const bool both_know = one.sequences > 0 && other.sequences > 0;
  return 4 * ratio(one.head_dim, other.head_dim) + ratio(one.tokens, other.tokens) +
         ratio(one.window, other.window) +
         (both_know ? ratio(mean_length(one), mean_length(other)) : 0.0);
}

bool comparable(const Facts& one, const Facts& other) {
  return one.sm == other.sm && one.half == other.half && one.mask == other.mask &&
         one.mode == other.mode;
}

std::string mask_of(const Call& call) {
  if (call.softcap.has_value()) return "softcap";
  if (call.spans.has_value()) return "spans";
  if (!call.window.has_value()) return call.causal ? "causal" : "full";
  return call.causal ? "window" : "two_sided";
}

int64_t capability_of([[maybe_unused]] const Tensor& tensor) {
#ifdef CUSEQ_WITH_CUDA
  if (tensor.is_cuda()) {
    const auto* properties = at::cuda::getCurrentDeviceProperties();
    return 10 * properties->major + properties->minor;
  }
#endif
  return 0;
}

}  // namespace

Facts facts_of(const Call& call) {
  Facts facts;
  facts.sm = capability_of(call.q);
  facts.half = call.q.scalar_type() == at::kHalf || call.q.scalar_type() == at::kBFloat16;
  facts.head_dim = std::max(call.q.size(2), call.v.size(2));
  facts.mask = mask_of(call);
  facts.window = call.window.value_or(0);
  facts.mode = is_capturing(call.q) ? "captured" : "eager";
  facts.tokens = call.queries.num_real_tokens.value_or(call.q.size(0));
  facts.sequences = call.queries.count();
  return facts;
}

void set_measured(std::vector<Measured> rows) {
  table().store(new std::vector<Measured>(std::move(rows)), std::memory_order_release);
}

const Measured* closest_measured(const Facts& facts) {
  const Measured* closest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Measured& row : *table().load(std::memory_order_acquire)) {
    if (!comparable(row.facts, facts)) continue;
    const double apart = distance(row.facts, facts);
    if (apart < least) {
      least = apart;
      closest = &row;
    }
  }
  return closest;
}

}  // namespace cuseq::attention
