#include "attention/measured.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "ops/checks.h"

#ifdef CUSEQ_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace cuseq::attention {
namespace {

// Binary logarithms of a call's sizes: sizes are compared by ratios.
struct Logarithms {
  double head_dim;
  double tokens;
  double window;
  // The mean length; in a capture the sequences that there is room for, which kernels pay for.
  double length_or_room;

  explicit Logarithms(const Facts& facts)
      : head_dim(of(facts.head_dim)),
        tokens(of(facts.tokens)),
        window(of(facts.window)),
        length_or_room(of(facts.mode == "captured"
                              ? facts.sequences
                              : facts.tokens / std::max<int64_t>(facts.sequences, 1))) {}

  static double of(int64_t size) {
    return std::log2(static_cast<double>(std::max<int64_t>(size, 1)));
  }
};

// A row of the table with its logarithms: every call is compared with every row.
struct Entry {
  Measured row;
  Logarithms logarithms;
};

// Readers hold pointers into it without a lock, so a table that was replaced is never freed. A
// process loads one; only tests load more.
std::atomic<const std::vector<Entry>*>& table() {
  static std::atomic<const std::vector<Entry>*> entries{new std::vector<Entry>()};
  return entries;
}

// The head dimension decides which tiles a kernel has, so it counts more than the sizes.
double distance(const Logarithms& one, const Logarithms& other, bool both_know_sequences) {
  return 4 * std::abs(one.head_dim - other.head_dim) + std::abs(one.tokens - other.tokens) +
         std::abs(one.window - other.window) +
         (both_know_sequences ? std::abs(one.length_or_room - other.length_or_room) : 0.0);
}

// Flash kernels end at head_dim 256, so what narrower heads measured says nothing of wider ones.
bool is_wide(const Facts& facts) { return facts.head_dim > 256; }

bool comparable(const Facts& one, const Facts& other) {
  return one.sm == other.sm && one.half == other.half && one.mask == other.mask &&
         one.mode == other.mode && is_wide(one) == is_wide(other);
}

}  // namespace

int64_t capability_of([[maybe_unused]] const Tensor& tensor) {
#ifdef CUSEQ_WITH_CUDA
  if (tensor.is_cuda()) {
    const auto* properties = at::cuda::getDeviceProperties(tensor.get_device());
    return 10 * properties->major + properties->minor;
  }
#endif
  return 0;
}

Facts facts_of(const Call& call) {
  Facts facts;
  facts.sm = capability_of(call.q);
  facts.half = call.q.scalar_type() == at::kHalf || call.q.scalar_type() == at::kBFloat16;
  facts.head_dim = std::max(call.q.size(2), call.v.size(2));
  facts.mask = call.mask();
  facts.window = call.window.value_or(0);
  facts.mode = is_capturing(call.q) ? "captured" : "eager";
  facts.tokens = call.queries.num_real_tokens.value_or(call.q.size(0));
  facts.sequences = call.queries.count();
  return facts;
}

void set_measured(std::vector<Measured> rows) {
  auto* entries = new std::vector<Entry>();
  entries->reserve(rows.size());
  for (Measured& row : rows) {
    const Logarithms logarithms(row.facts);
    entries->push_back({std::move(row), logarithms});
  }
  table().store(entries, std::memory_order_release);
}

const Measured* closest_measured(const Facts& facts, std::string_view backend) {
  const Logarithms logarithms(facts);
  const Measured* closest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Entry& entry : *table().load(std::memory_order_acquire)) {
    if (!comparable(entry.row.facts, facts)) continue;
    if (!backend.empty() && !entry.row.us.contains(backend)) continue;
    const bool both_know_sequences = entry.row.facts.sequences > 0 && facts.sequences > 0;
    const double apart = distance(entry.logarithms, logarithms, both_know_sequences);
    if (apart < least) {
      least = apart;
      closest = &entry.row;
    }
  }
  return closest;
}

const Measured* measured_like(const Facts& facts, std::string_view backend) {
  const Measured* row = closest_measured(facts, backend);
  const bool is_like_causal =
      facts.mask == "full" || facts.mask == "window" || facts.mask == "two_sided";
  if (row != nullptr || !is_like_causal) return row;
  Facts causal = facts;
  causal.mask = "causal";
  causal.window = 0;
  return closest_measured(causal, backend);
}

}  // namespace cuseq::attention
