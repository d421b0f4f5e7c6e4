#include "packing/rows.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

namespace cuseq::packing {
namespace {

constexpr int32_t kNone = -1;

struct Row {
  int64_t room;
  int32_t number;
};

// Open rows by their room, and of those with equal room the first opened in front.
class OpenRows {
 public:
  // Remove and return the row with the least room that is at least `length`; if there is none, both
  // fields are kNone.
  Row take(int64_t length) {
    const auto found = rooms_.lower_bound(length);
    if (found == rooms_.end()) return {kNone, kNone};
    const Row row{found->first, found->second.top()};
    found->second.pop();
    if (found->second.empty()) spare_ = rooms_.extract(found);
    return row;
  }

  void put(Row row) {
    auto place = rooms_.lower_bound(row.room);
    if (place == rooms_.end() || place->first != row.room) {
      if (spare_.empty()) {
        place = rooms_.try_emplace(place, row.room);
      } else {
        spare_.key() = row.room;
        place = rooms_.insert(place, std::move(spare_));
      }
    }
    place->second.push(row.number);
  }

 private:
  using Numbers = std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>>;
  std::map<int64_t, Numbers> rooms_;
  std::map<int64_t, Numbers>::node_type spare_;  // a row is mostly put back with less room
};

Rows best_fit(const std::vector<Run>& runs, int64_t samples, int64_t capacity) {
  Rows rows;
  rows.row_of.reserve(samples);
  OpenRows open;
  for (const auto& [length, count] : runs) {
    for (int64_t left = count; left > 0;) {
      Row row = open.take(length);
      if (row.number == kNone) row = {capacity, static_cast<int32_t>(rows.num_rows++)};
      // As long as the samples of this run fit, this row stays the one with the least room.
      const int64_t fit = length == 0 ? left : std::min(left, row.room / length);
      rows.row_of.insert(rows.row_of.end(), fit, row.number);
      left -= fit;
      open.put({row.room - fit * length, row.number});
    }
  }
  return rows;
}

// The room of each row, as a tree of maxima: each level holds the largest of every kFan entries of
// the level below.
class RoomsInOrder {
 public:
  // Return the first row from `row` on with room for `length`, or kNone.
  int64_t first_that_fits(int64_t row, int64_t length) const {
    for (size_t k = 0; k < levels_.size(); ++k) {
      const int64_t end = block_end(k, row);
      while (row < end && levels_[k][row] < length) ++row;
      if (row < end) return first_below(row, k, length);
      row = (end + kFan - 1) / kFan;
    }
    return kNone;
  }

  int64_t operator[](int64_t row) const { return levels_[0][row]; }

  // Set a row's room. A new row must have the next number.
  void set(int64_t row, int64_t room) {
    for (size_t k = 0;; ++k) {
      if (k == levels_.size()) levels_.emplace_back();
      auto& level = levels_[k];
      if (row == static_cast<int64_t>(level.size())) {
        level.push_back(room);
      } else if (level[row] == room) {
        return;
      } else {
        level[row] = room;
      }
      if (level.size() == 1) return;
      const auto block = level.begin() + row / kFan * kFan;
      room = *std::max_element(block, level.begin() + block_end(k, row));
      row /= kFan;
    }
  }

 private:
  static constexpr int64_t kFan = 16;

  int64_t block_end(size_t k, int64_t row) const {
    return std::min<int64_t>((row / kFan + 1) * kFan, levels_[k].size());
  }

  int64_t first_below(int64_t row, size_t level, int64_t length) const {
    while (level > 0) {
      row *= kFan;
      for (--level; levels_[level][row] < length;) ++row;
    }
    return row;
  }

  std::vector<std::vector<int64_t>> levels_;
};

Rows first_fit(const std::vector<Run>& runs, int64_t samples, int64_t capacity) {
  Rows rows;
  rows.row_of.reserve(samples);
  RoomsInOrder rooms;
  for (const auto& [length, count] : runs) {
    // Rows without room for one sample of a run have none for the rest of it.
    int64_t row = 0;
    for (int64_t left = count; left > 0;) {
      row = rooms.first_that_fits(row, length);
      if (row == kNone) row = rows.num_rows;
      if (row == rows.num_rows) rooms.set(rows.num_rows++, capacity);
      const int64_t fit = length == 0 ? left : std::min(left, rooms[row] / length);
      rows.row_of.insert(rows.row_of.end(), fit, static_cast<int32_t>(row));
      left -= fit;
      rooms.set(row, rooms[row] - fit * length);
    }
  }
  return rows;
}

}  // namespace

Rows pack_descending(const Descending& sorted, int64_t capacity, Fit fit) {
  const auto samples = static_cast<int64_t>(sorted.order.size());
  return fit == Fit::kFirst ? first_fit(sorted.runs, samples, capacity)
                            : best_fit(sorted.runs, samples, capacity);
}

std::vector<int64_t> row_offsets(const Rows& rows) {
  std::vector<int64_t> offsets(rows.num_rows + 1);
  for (const int32_t row : rows.row_of) ++offsets[row + 1];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  return offsets;
}

std::vector<int32_t> by_row(const std::vector<int32_t>& samples, const Rows& rows,
                            const std::vector<int64_t>& offsets) {
  std::vector<int32_t> result(samples.size());
  std::vector<int64_t> next = offsets;
  for (size_t i = 0; i < samples.size(); ++i) result[next[rows.row_of[i]]++] = samples[i];
  return result;
}

}  // namespace cuseq::packing
