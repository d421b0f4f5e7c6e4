#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ops/types.h"
#include "packing/permutation.h"
#include "packing/rows.h"
#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

using packing::Strategy;

struct Window {
  std::vector<int32_t> samples;
  std::vector<int64_t> offsets;
};

// Most samples packed at a time: larger windows are packed in parts, which saves memory and keeps
// the sort's reads in the CPU cache.
constexpr size_t kPart = size_t{1} << 17;

// Pack samples: sort them by row, in place, and append the end of each row to `ends`.
template <typename Length>
void pack_part(std::span<int32_t> samples, const Tensor& lengths, int64_t capacity,
               Strategy strategy, std::vector<int64_t>& ends) {
  const auto n = static_cast<int64_t>(samples.size());
  const auto length_of = lengths.accessor<const Length, 1>();
  std::vector<Length> found(n);
  for (int64_t i = 0; i < n; ++i) {
    found[i] = length_of[samples[i]];
    // Samples of other lengths were left out, but other threads may write the lengths meanwhile.
    TORCH_CHECK_VALUE(0 <= found[i] && found[i] <= capacity,
                      "lengths must not change while rows are planned, got lengths[", samples[i],
                      "] = ", found[i]);
  }
  const auto length_at = [&](int64_t i) { return found[i]; };
  std::vector<int64_t> offsets;
  if (strategy == Strategy::kSequential) {
    offsets = packing::row_offsets(packing::pack_in_order(length_at, n, capacity));
  } else {
    packing::Descending sorted = packing::sort_descending(length_at, n);
    for (int32_t& sample : sorted.order) sample = samples[sample];
    const auto fit = strategy == Strategy::kBestFit ? packing::Fit::kBest : packing::Fit::kFirst;
    const packing::Rows rows = packing::pack_descending(sorted, capacity, fit);
    offsets = packing::row_offsets(rows);
    const std::vector<int32_t> ordered = packing::by_row(sorted.order, rows, offsets);
    std::copy(ordered.begin(), ordered.end(), samples.begin());
  }
  const int64_t base = ends.back();
  for (size_t row = 1; row < offsets.size(); ++row) ends.push_back(base + offsets[row]);
}

template <typename Length>
Window pack_samples(const Tensor& lengths, const Tensor& carried, OptionalInt seed, int64_t begin,
                    int64_t end, int64_t capacity, Strategy strategy) {
  const auto length_of = lengths.accessor<const Length, 1>();
  const auto held = carried.accessor<const int32_t, 1>();
  std::vector<int32_t> samples;
  samples.reserve(carried.numel() + end - begin);
  const auto add = [&](int64_t sample) {
    const Length length = length_of[sample];
    if (length >= 0 && length <= capacity) samples.push_back(static_cast<int32_t>(sample));
  };
  for (int64_t i = 0; i < carried.numel(); ++i) add(held[i]);
  if (seed.has_value()) {
    const packing::Permutation permutation(lengths.numel(), static_cast<uint64_t>(*seed));
    for (int64_t i = begin; i < end; ++i) add(permutation(i));
  } else {
    for (int64_t i = begin; i < end; ++i) add(i);
  }
  Window window{std::move(samples), {0}};
  const std::span<int32_t> all(window.samples);
  const size_t part = strategy == Strategy::kSequential ? all.size() : kPart;
  for (size_t first = 0, end = 0; end < all.size(); first = window.offsets.back()) {
    end = std::min(end + part, all.size());
    pack_part<Length>(all.subspan(first, end - first), lengths, capacity, strategy, window.offsets);
    // Drop the last row, the emptiest: its samples go into the next part.
    if (end < all.size()) window.offsets.pop_back();
  }
  return window;
}

}  // namespace

std::tuple<Tensor, Tensor> pack_window(const Tensor& lengths, const Tensor& carried,
                                       OptionalInt seed, int64_t begin, int64_t end,
                                       int64_t capacity, std::string_view strategy) {
  check_host_vector(lengths, "lengths");
  check_samples(carried, lengths.numel(), "carried");
  TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= lengths.numel(),
                    "begin and end must satisfy 0 <= begin <= end <= ", lengths.numel(), ", got ",
                    begin, " and ", end);
  check_capacity(capacity);
  const Strategy chosen = strategy_named(strategy, /*may_cut=*/false);
  Window window = lengths.scalar_type() == at::kInt
                      ? pack_samples<int32_t>(lengths, carried, seed, begin, end, capacity, chosen)
                      : pack_samples<int64_t>(lengths, carried, seed, begin, end, capacity, chosen);
  return {tensor_of(std::move(window.samples)), tensor_of(std::move(window.offsets))};
}

}  // namespace cuseq
