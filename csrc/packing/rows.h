#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// Assignment of samples to rows. This code does not depend on torch. Lengths must not be negative
// or above the capacity, and there must be fewer than 2^31.
namespace cuseq::packing {

// `count` consecutive samples of the same length.
struct Run {
  int64_t length;
  int64_t count;
};

// Sample numbers from the longest sample to the shortest, in the given order among equals, and the
// runs of equal lengths in that order. `length_at(i)` returns the length of sample i.
struct Descending {
  std::vector<int32_t> order;
  std::vector<Run> runs;
};
template <typename LengthAt>
Descending sort_descending(LengthAt length_at, int64_t n);

// The row of each sample, in the order of placement. Rows are numbered in the order of opening.
struct Rows {
  std::vector<int32_t> row_of;
  int64_t num_rows = 0;
};

// kBest: place a sample into the row with the least room that fits; of equals, the first opened.
// kFirst: place it into the first row that fits.
enum class Fit { kBest, kFirst };
Rows pack_descending(const Descending& sorted, int64_t capacity, Fit fit);

// Place each sample into the last row, or into a new row if the last one has no room.
template <typename LengthAt>
Rows pack_in_order(LengthAt length_at, int64_t n, int64_t capacity);

// Return `num_rows + 1` offsets: where each row starts among the samples sorted by row.
std::vector<int64_t> row_offsets(const Rows& rows);

// Return `samples` sorted by row; there must be one for each entry of `rows.row_of`.
std::vector<int32_t> by_row(const std::vector<int32_t>& samples, const Rows& rows,
                            const std::vector<int64_t>& offsets);

template <typename LengthAt>
Descending sort_descending(LengthAt length_at, int64_t n) {
  Descending sorted;
  sorted.order.resize(n);
  int64_t longest = 0;
  for (int64_t i = 0; i < n; ++i) longest = std::max<int64_t>(longest, length_at(i));
  // A table with an entry for each length sorts a million samples in a tenth of the time. With more
  // lengths per sample than 16, filling it takes longer than comparing; with more than 4, and many,
  // its memory would grow with the lengths instead of the number of samples.
  if (longest > 16 * n || longest > 4 * n + (1 << 16)) {
    // Copies of the lengths: looking them up in each comparison takes longer.
    std::vector<std::pair<int64_t, int32_t>> keys(n);
    for (int64_t i = 0; i < n; ++i) keys[i] = {-length_at(i), static_cast<int32_t>(i)};
    std::sort(keys.begin(), keys.end());
    for (int64_t i = 0; i < n; ++i) {
      sorted.order[i] = keys[i].second;
      const int64_t length = -keys[i].first;
      if (sorted.runs.empty() || sorted.runs.back().length != length) {
        sorted.runs.push_back({length, 0});
      }
      ++sorted.runs.back().count;
    }
    return sorted;
  }
  std::vector<int32_t> start(longest + 2);  // start[longest - length]: first sample of that length
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
