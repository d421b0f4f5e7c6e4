#include "packing/bin_pack.h"

#include <algorithm>
#include <numeric>

#include "packing/rows.h"

namespace cuseq::packing {
namespace {

// Pack whole samples; no length may exceed the capacity.
template <typename Length>
Plan pack_whole(const Length* lengths, int64_t n, int64_t capacity, Strategy strategy) {
  const auto length_at = [lengths](int64_t i) { return lengths[i]; };
  std::vector<int32_t> samples;
  Plan plan;
  if (strategy == Strategy::kSequential) {
    plan.offsets = row_offsets(pack_in_order(length_at, n, capacity));
    samples.resize(n);
    std::iota(samples.begin(), samples.end(), 0);
  } else {
    const Descending sorted = sort_descending(length_at, n);
    const Fit fit = strategy == Strategy::kBestFit ? Fit::kBest : Fit::kFirst;
    const Rows rows = pack_descending(sorted, capacity, fit);
    plan.offsets = row_offsets(rows);
    samples = by_row(sorted.order, rows, plan.offsets);
  }
  plan.indices.assign(samples.begin(), samples.end());
  plan.starts.resize(n);
  plan.lengths.resize(n);
  for (int64_t i = 0; i < n; ++i) plan.lengths[i] = lengths[samples[i]];
  return plan;
}

// Split each sample into pieces of `capacity` tokens and the rest, and pack every piece by itself.
template <typename Length>
Plan pack_split(const Length* lengths, int64_t n, int64_t capacity, Strategy strategy) {
  Plan pieces;
  for (int64_t i = 0; i < n; ++i) {
    int64_t start = 0;
    do {
      pieces.indices.push_back(i);
      pieces.starts.push_back(start);
      pieces.lengths.push_back(std::min<int64_t>(capacity, lengths[i] - start));
      start += pieces.lengths.back();
    } while (start < lengths[i]);
  }
  Plan plan = pack_whole(pieces.lengths.data(), static_cast<int64_t>(pieces.lengths.size()),
                         capacity, strategy);
  for (size_t i = 0; i < plan.indices.size(); ++i) {
    const int64_t piece = plan.indices[i];
    plan.indices[i] = pieces.indices[piece];
    plan.starts[i] = pieces.starts[piece];
  }
  return plan;
}

template <typename Length>
Plan pack_truncated(const Length* lengths, int64_t n, int64_t capacity, Strategy strategy) {
  std::vector<int64_t> cut(lengths, lengths + n);
  for (int64_t& length : cut) length = std::min(length, capacity);
  return pack_whole(cut.data(), n, capacity, strategy);
}

// Fill rows in order and cut them exactly at the capacity.
template <typename Length>
Plan wrap(const Length* lengths, int64_t n, int64_t capacity) {
  Plan plan;
  int64_t room = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t start = 0;
    do {
      if (plan.offsets.empty() || (room == 0 && lengths[i] > 0)) {
        plan.offsets.push_back(static_cast<int64_t>(plan.indices.size()));
        room = capacity;
      }
      const int64_t length = std::min<int64_t>(room, lengths[i] - start);
      plan.indices.push_back(i);
      plan.starts.push_back(start);
      plan.lengths.push_back(length);
      start += length;
      room -= length;
    } while (start < lengths[i]);
  }
  plan.offsets.push_back(static_cast<int64_t>(plan.indices.size()));
  return plan;
}

}  // namespace

template <typename Length>
Plan bin_pack(const Length* lengths, int64_t n, int64_t capacity, Strategy strategy,
              Overlong overlong) {
  if (strategy == Strategy::kWrapped) return wrap(lengths, n, capacity);
  const int64_t longest = n == 0 ? 0 : *std::max_element(lengths, lengths + n);
  if (longest <= capacity) return pack_whole(lengths, n, capacity, strategy);
  return overlong == Overlong::kSplit ? pack_split(lengths, n, capacity, strategy)
                                      : pack_truncated(lengths, n, capacity, strategy);
}

template Plan bin_pack(const int32_t*, int64_t, int64_t, Strategy, Overlong);
template Plan bin_pack(const int64_t*, int64_t, int64_t, Strategy, Overlong);

}  // namespace cuseq::packing
