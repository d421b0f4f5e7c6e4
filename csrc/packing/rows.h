#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

// Which row each sample goes to. Nothing here knows torch. Lengths are never negative, never above
// the capacity, and fewer than 2^31.
namespace cuseq::packing {

// Samples of one length, `count` of them next to each other.
struct Run {
  int64_t length;
  int64_t count;
};

// Samples from the longest to the shortest, equal ones as they came: their numbers, and the runs
// of equal lengths that these make. `length_at(i)` is the length of sample i.
struct Descending {
  std::vector<int32_t> order;
  std::vector<Run> runs;
};
template <typename LengthAt>
Descending sort_descending(LengthAt length_at, int64_t n);

// The row of each sample, in the order in which they were placed. Rows are numbered as they open.
struct Rows {
  std::vector<int32_t> row_of;
  int64_t num_rows = 0;
};

// kBest: into the row with the least room that fits, of those the one opened first.
// kFirst: into the first row that fits.
enum class Fit { kBest, kFirst };
Rows pack_descending(const Descending& sorted, int64_t capacity, Fit fit);

// Into the last row, or a new one where that has no room.
template <typename LengthAt>
Rows pack_in_order(LengthAt length_at, int64_t n, int64_t capacity);

// `num_rows + 1` offsets: where each row starts among the samples sorted by row.
std::vector<int64_t> row_offsets(const Rows& rows);

// `samples`, one for each entry of `rows.row_of`, sorted by row.
std::vector<int32_t> by_row(const std::vector<int32_t>& samples, const Rows& rows,
                            const std::vector<int64_t>& offsets);

// Tables with an entry for each possible length or room are used up to this many entries a sample;
// beyond, memory would follow the capacity instead of the samples.
inline bool worth_a_table(int64_t entries, int64_t samples) {
  return entries <= 4 * samples + (1 << 16);
}

template <typename LengthAt>
Descending sort_descending(LengthAt length_at, int64_t n) {
  Descending sorted;
  sorted.order.resize(n);
  int64_t longest = 0;
  for (int64_t i = 0; i < n; ++i) longest = std::max<int64_t>(longest, length_at(i));
  if (!worth_a_table(longest, n)) {
    std::iota(sorted.order.begin(), sorted.order.end(), 0);
    std::stable_sort(sorted.order.begin(), sorted.order.end(),
                     [&](int32_t a, int32_t b) { return length_at(a) > length_at(b); });
    for (const int32_t i : sorted.order) {
      const int64_t length = length_at(i);
      if (sorted.runs.empty() || sorted.runs.back().length != length) {
        sorted.runs.push_back({length, 0});
      }
      ++sorted.runs.back().count;
    }
    return sorted;
  }
  std::vector<int32_t> start(longest + 2);  // start[longest - length]: of the samples this long
  for (int64_t i = 0; i < n; ++i) ++start[longest - length_at(i) + 1];
  for (int64_t shorter = 0; shorter <= longest; ++shorter) {
    const int64_t count = start[shorter + 1];
    if (count > 0) sorted.runs.push_back({longest - shorter, count});
    start[shorter + 1] += start[shorter];
  }
  for (int64_t i = 0; i < n; ++i) {
    sorted.order[start[longest - length_at(i)]++] = static_cast<int32_t>(i);
  }
  return sorted;
}

template <typename LengthAt>
Rows pack_in_order(LengthAt length_at, int64_t n, int64_t capacity) {
  Rows rows;
  rows.row_of.resize(n);
  int64_t room = -1;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t length = length_at(i);
    if (room < length) {
      room = capacity;
      ++rows.num_rows;
    }
    room -= length;
    rows.row_of[i] = static_cast<int32_t>(rows.num_rows - 1);
  }
  return rows;
}

}  // namespace cuseq::packing
