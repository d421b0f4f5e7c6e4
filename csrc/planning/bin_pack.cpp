#include "packing/bin_pack.h"

#include <ATen/ops/clone.h>

#include <limits>
#include <utility>

#include "ops/types.h"
#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

constexpr int64_t kMaxPieces = std::numeric_limits<int32_t>::max();

template <typename Length>
void check_values(const Length* lengths, int64_t n, int64_t capacity, bool may_be_longer,
                  bool truncates) {
  int64_t pieces = n;
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_VALUE(lengths[i] >= 0, "lengths must not be negative, got lengths[", i,
                      "] = ", lengths[i]);
    if (lengths[i] <= capacity) continue;
    TORCH_CHECK_VALUE(may_be_longer, "lengths must be at most capacity = ", capacity,
                      ", got lengths[", i, "] = ", lengths[i],
                      ": overlong=\"split\" and overlong=\"truncate\" take longer ones");
    if (truncates) continue;
    const int64_t more = lengths[i] / capacity;
    TORCH_CHECK_VALUE(more < kMaxPieces - pieces, "lengths must make fewer than 2^31 pieces, but ",
                      "lengths[", i, "] = ", lengths[i], " alone makes ", more,
                      " of capacity = ", capacity);
    pieces += more;
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> bin_pack(const Tensor& lengths, int64_t capacity,
                                                    std::string_view strategy,
                                                    std::string_view overlong) {
  check_host_vector(lengths, "lengths");
  check_capacity(capacity);
  const packing::Strategy chosen = strategy_named(strategy, /*may_cut=*/true);
  TORCH_CHECK_VALUE(overlong == "raise" || overlong == "split" || overlong == "truncate",
                    "overlong must be \"raise\", \"split\" or \"truncate\", got \"", overlong,
                    "\"");
  const bool may_be_longer = overlong != "raise" || chosen == packing::Strategy::kWrapped;
  const auto too_long =
      overlong == "truncate" ? packing::Overlong::kTruncate : packing::Overlong::kSplit;

  // A copy, since other threads may write the lengths between the checks and the packing.
  const Tensor source = lengths.clone(at::MemoryFormat::Contiguous);
  const auto plan_of = [&](const auto* values) {
    const bool truncates =
        too_long == packing::Overlong::kTruncate && chosen != packing::Strategy::kWrapped;
    check_values(values, source.numel(), capacity, may_be_longer, truncates);
    return packing::bin_pack(values, source.numel(), capacity, chosen, too_long);
  };
  packing::Plan plan = source.scalar_type() == at::kInt ? plan_of(source.const_data_ptr<int32_t>())
                                                        : plan_of(source.const_data_ptr<int64_t>());
  return {tensor_of(std::move(plan.indices)), tensor_of(std::move(plan.offsets)),
          tensor_of(std::move(plan.starts)), tensor_of(std::move(plan.lengths))};
}

}  // namespace cuseq
