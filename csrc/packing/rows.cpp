#include "packing/rows.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>
#include <utility>

namespace cuseq::packing {
namespace {

constexpr int32_t kNone = -1;

// A set of numbers in [0, size), as a tree of bits: each level has one bit per word of the level
// below, set if that word is not zero.
class BitSet {
 public:
  explicit BitSet(int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  void insert(int64_t value) {
    for (auto& level : levels_) {
      level[value / 64] |= uint64_t{1} << (value % 64);
      value /= 64;
    }
  }

  void erase(int64_t value) {
    for (auto& level : levels_) {
      level[value / 64] &= ~(uint64_t{1} << (value % 64));
      if (level[value / 64] != 0) return;
      value /= 64;
    }
  }

  // Return the least member that is at least `value`, or kNone.
  int64_t at_least(int64_t value) const {
    for (size_t k = 0; k < levels_.size(); ++k) {
      const auto& level = levels_[k];
      if (value / 64 >= static_cast<int64_t>(level.size())) return kNone;
      const uint64_t rest = level[value / 64] >> (value % 64);
      if (rest != 0) return lowest_below(value + std::countr_zero(rest), k);
      value = value / 64 + 1;
    }
    return kNone;
  }

 private:
  int64_t lowest_below(int64_t value, size_t level) const {
    while (level > 0) value = value * 64 + std::countr_zero(levels_[--level][value]);
    return value;
  }

  std::vector<std::vector<uint64_t>> levels_;
};

struct Row {
  int64_t room;
  int32_t number;
};

// Open rows by their room: one skew heap of row numbers for each room, linked through arrays.
class RoomTable {
 public:
  explicit RoomTable(int64_t capacity) : rooms_(capacity + 1), first_(capacity + 1, kNone) {}

  // Remove and return the row with the least room that is at least `length`; if there is none, both
  // fields are kNone.
  Row take(int64_t length) {
    const int64_t room = rooms_.at_least(length);
    if (room == kNone) return {kNone, kNone};
    const int32_t row = first_[room];
    first_[room] = merge(children_[row].left, children_[row].right);
    if (first_[room] == kNone) rooms_.erase(room);
    return {room, row};
  }

  void put(Row row) {
    if (row.number >= static_cast<int64_t>(children_.size())) children_.resize(row.number + 1);
    children_[row.number] = {kNone, kNone};
    if (first_[row.room] == kNone) rooms_.insert(row.room);
    first_[row.room] = merge(first_[row.room], row.number);
  }

 private:
  struct Children {
    int32_t left;
    int32_t right;
  };

  // Walk down the right spine and swap the children on the way, which gives logarithmic amortised
  // cost.
  int32_t merge(int32_t a, int32_t b) {
    int32_t top = kNone;
    int32_t* link = &top;
    while (a != kNone && b != kNone) {
      if (b < a) std::swap(a, b);
      *link = a;
      Children& children = children_[a];
      const int32_t rest = children.right;
      children.right = children.left;
      link = &children.left;
      a = rest;
    }
    *link = a == kNone ? b : a;
    return top;
  }

  BitSet rooms_;
  std::vector<int32_t> first_;
  std::vector<Children> children_;
};

// Like RoomTable, for capacities far above the number of samples.
class RoomTree {
 public:
  explicit RoomTree(int64_t) {}

  Row take(int64_t length) {
    const auto found = rows_.lower_bound({length, 0});
    if (found == rows_.end()) return {kNone, kNone};
    const Row row{found->first, found->second};
    rows_.erase(found);
    return row;
  }

  void put(Row row) { rows_.emplace(row.room, row.number); }

 private:
  std::set<std::pair<int64_t, int32_t>> rows_;
};

template <typename Rooms>
Rows best_fit(const std::vector<Run>& runs, int64_t samples, int64_t capacity) {
  Rows rows;
  rows.row_of.reserve(samples);
  Rooms rooms(capacity);
  for (const auto& [length, count] : runs) {
    for (int64_t left = count; left > 0;) {
      Row row = rooms.take(length);
      if (row.number == kNone) row = {capacity, static_cast<int32_t>(rows.num_rows++)};
      // As long as the samples of this run fit, this row stays the one with the least room.
      const int64_t fit = length == 0 ? left : std::min(left, row.room / length);
      rows.row_of.insert(rows.row_of.end(), fit, row.number);
      left -= fit;
      rooms.put({row.room - fit * length, row.number});
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
  if (fit == Fit::kFirst) return first_fit(sorted.runs, samples, capacity);
  return worth_a_table(capacity, samples) ? best_fit<RoomTable>(sorted.runs, samples, capacity)
                                          : best_fit<RoomTree>(sorted.runs, samples, capacity);
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
