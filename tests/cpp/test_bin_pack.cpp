// Planning of rows on the host, compared with plain loops.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "planning/planning.h"
#include "tensors.h"

namespace {

using cuseq_tests::ints;
using cuseq_tests::Values;
using cuseq_tests::values_of;

struct Piece {
  int64_t sample;
  int64_t start;
  int64_t length;

  bool operator==(const Piece&) const = default;
};

using Row = std::vector<Piece>;

std::ostream& operator<<(std::ostream& out, const Piece& piece) {
  return out << piece.sample << "[" << piece.start << ":+" << piece.length << "]";
}

std::vector<Row> pack(const at::Tensor& lengths, int64_t capacity, const std::string& strategy,
                      const std::string& overlong = "raise") {
  const auto [indices, offsets, starts, counts] =
      cuseq::bin_pack(lengths, capacity, strategy, overlong);
  const Values samples = values_of(indices);
  const Values ends = values_of(offsets);
  const Values begins = values_of(starts);
  const Values tokens = values_of(counts);
  std::vector<Row> rows;
  for (size_t row = 0; row + 1 < ends.size(); ++row) {
    rows.emplace_back();
    for (int64_t i = ends[row]; i < ends[row + 1]; ++i) {
      rows.back().push_back({samples[i], begins[i], tokens[i]});
    }
  }
  EXPECT_EQ(ends.front(), 0);
  EXPECT_EQ(ends.back(), static_cast<int64_t>(samples.size()));
  return rows;
}

std::vector<Row> naive_wrapped(const Values& lengths, int64_t capacity) {
  std::vector<Row> rows;
  int64_t room = 0;
  for (size_t sample = 0; sample < lengths.size(); ++sample) {
    int64_t start = 0;
    do {
      if (rows.empty() || (room == 0 && start < lengths[sample])) {
        rows.emplace_back();
        room = capacity;
      }
      const int64_t tokens = std::min(room, lengths[sample] - start);
      rows.back().push_back({static_cast<int64_t>(sample), start, tokens});
      start += tokens;
      room -= tokens;
    } while (start < lengths[sample]);
  }
  return rows;
}

std::vector<Row> naive_pack(const Values& lengths, int64_t capacity, const std::string& strategy,
                            const std::string& overlong = "raise") {
  if (strategy == "wrapped") return naive_wrapped(lengths, capacity);
  Row pieces;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto sample = static_cast<int64_t>(i);
    pieces.push_back({sample, 0, std::min(lengths[i], capacity)});
    if (overlong != "split") continue;
    for (int64_t start = capacity; start < lengths[i]; start += capacity) {
      pieces.push_back({sample, start, std::min(lengths[i] - start, capacity)});
    }
  }
  if (strategy != "sequential") {
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.length > b.length; });
  }
  std::vector<Row> rows;
  Values room;
  for (const Piece& piece : pieces) {
    size_t chosen = rows.size();
    for (size_t row = 0; row < rows.size(); ++row) {
      if (room[row] < piece.length) continue;
      if (strategy == "sequential" && row + 1 != rows.size()) continue;
      if (chosen == rows.size() || (strategy == "bfd" && room[row] < room[chosen])) chosen = row;
    }
    if (chosen == rows.size()) {
      rows.emplace_back();
      room.push_back(capacity);
    }
    rows[chosen].push_back(piece);
    room[chosen] -= piece.length;
  }
  return rows;
}

const std::vector<std::string> kStrategies = {"bfd", "ffd", "sequential", "wrapped"};

TEST(BinPack, LiteralCase) {
  const at::Tensor lengths = ints({7, 5, 1, 3, 3}, at::kInt);
  using Rows = std::vector<Row>;
  EXPECT_EQ(pack(lengths, 9, "bfd"),
            (Rows{{{0, 0, 7}}, {{1, 0, 5}, {3, 0, 3}, {2, 0, 1}}, {{4, 0, 3}}}));
  EXPECT_EQ(pack(lengths, 9, "ffd"),
            (Rows{{{0, 0, 7}, {2, 0, 1}}, {{1, 0, 5}, {3, 0, 3}}, {{4, 0, 3}}}));
  EXPECT_EQ(pack(lengths, 9, "sequential"),
            (Rows{{{0, 0, 7}}, {{1, 0, 5}, {2, 0, 1}, {3, 0, 3}}, {{4, 0, 3}}}));
  EXPECT_EQ(
      pack(lengths, 9, "wrapped"),
      (Rows{{{0, 0, 7}, {1, 0, 2}}, {{1, 2, 3}, {2, 0, 1}, {3, 0, 3}, {4, 0, 2}}, {{4, 2, 1}}}));
}

TEST(BinPack, EqualToTheLoops) {
  std::mt19937_64 random(7);
  const Values capacities = {1, 2, 63, 64, 65, 100, 4096, 4097, int64_t{1} << 31, int64_t{1} << 40};
  for (int i = 0; i < 600; ++i) {
    const int64_t capacity = capacities[i % capacities.size()];
    const int64_t longest = i % 3 == 0 ? std::min<int64_t>(capacity, 6) : capacity;
    Values lengths(random() % (i % 50 == 0 ? 1500 : 60));
    for (int64_t& length : lengths) length = static_cast<int64_t>(random() % (longest + 1));
    for (const std::string& strategy : kStrategies) {
      const std::vector<Row> expected = naive_pack(lengths, capacity, strategy);
      ASSERT_EQ(pack(ints(lengths), capacity, strategy), expected) << strategy << " " << capacity;
      if (capacity > std::numeric_limits<int32_t>::max()) continue;
      ASSERT_EQ(pack(ints(lengths, at::kInt), capacity, strategy), expected);
    }
  }
}

TEST(BinPack, TooLongOnes) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 200; ++i) {
    const int64_t capacity = 1 + static_cast<int64_t>(random() % 20);
    Values lengths(random() % 30);
    for (int64_t& length : lengths) length = static_cast<int64_t>(random() % (3 * capacity + 1));
    for (const std::string& strategy : kStrategies) {
      for (const std::string overlong : {"split", "truncate"}) {
        ASSERT_EQ(pack(ints(lengths), capacity, strategy, overlong),
                  naive_pack(lengths, capacity, strategy, overlong))
            << strategy << " " << overlong;
      }
    }
  }
}

TEST(BinPack, StridedAndEmptyLengths) {
  const at::Tensor column = ints({5, 9, 0, 9, 3, 9}).reshape({3, 2}).select(1, 0);
  ASSERT_FALSE(column.is_contiguous());
  for (const std::string& strategy : kStrategies) {
    EXPECT_EQ(pack(column, 8, strategy), naive_pack({5, 0, 3}, 8, strategy));
    EXPECT_TRUE(pack(ints({}), 8, strategy).empty());
    EXPECT_EQ(pack(ints({0, 0}), 8, strategy).size(), 1u);
  }
}

template <typename Error>
void expect_error(const at::Tensor& lengths, int64_t capacity, const std::string& strategy,
                  const std::string& overlong, const std::string& part) {
  try {
    pack(lengths, capacity, strategy, overlong);
    ADD_FAILURE() << "nothing was thrown, expected: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
        << error.what_without_backtrace();
  }
}

TEST(BinPack, ErrorsNameArgumentIndexAndValue) {
  const at::Tensor good = ints({3, 4});
  for (const std::string& strategy : kStrategies) {
    for (const std::string overlong : {"raise", "split", "truncate"}) {
      expect_error<c10::ValueError>(ints({3, -2, -4}), 8, strategy, overlong, "lengths[1] = -2");
      expect_error<c10::ValueError>(good, 0, strategy, overlong, "capacity");
    }
    if (strategy == "wrapped") continue;
    expect_error<c10::ValueError>(ints({3, 9, 10}), 8, strategy, "raise", "lengths[1] = 9");
    expect_error<c10::ValueError>(ints({3, 9}), 8, strategy, "raise", "capacity = 8");
  }
  expect_error<c10::ValueError>(good, 8, "best", "raise", "strategy");
  expect_error<c10::ValueError>(good, 8, "bfd", "cut", "overlong");
  expect_error<c10::ValueError>(good.reshape({1, 2}), 8, "bfd", "raise", "lengths");
  expect_error<c10::TypeError>(at::ones({2}), 8, "bfd", "raise", "int32 or int64");
}

TEST(Permutation, EveryNumberOnce) {
  for (int64_t n = 0; n < 300; ++n) {
    Values whole = values_of(cuseq::permutation(n, /*seed=*/n * 7 - 100, 0, n));
    Values parts = values_of(cuseq::permutation(n, n * 7 - 100, 0, n / 3));
    const Values rest = values_of(cuseq::permutation(n, n * 7 - 100, n / 3, n));
    parts.insert(parts.end(), rest.begin(), rest.end());
    ASSERT_EQ(parts, whole);
    std::sort(whole.begin(), whole.end());
    Values expected(n);
    std::iota(expected.begin(), expected.end(), 0);
    ASSERT_EQ(whole, expected);
  }
}

}  // namespace
