// Tests of the arithmetic in cuseq/seqlens.h, which needs no torch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "cuseq/seqlens.h"

namespace {

constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int32_t kInt32Min = std::numeric_limits<int32_t>::min();
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kInt64Min = std::numeric_limits<int64_t>::min();

struct Pack {
  std::vector<int32_t> lengths;
  std::vector<int32_t> cu_seqlens = {0};
  int64_t total_tokens = 0;

  Pack(std::vector<int32_t> of_lengths, int32_t tail) : lengths(std::move(of_lengths)) {
    for (const int32_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    total_tokens = cu_seqlens.back() + tail;
  }

  cuseq::SeqLens view() const { return {cu_seqlens.data(), static_cast<int64_t>(lengths.size())}; }

  // The segment of each token, written out sequence by sequence; the tail is segment n.
  std::vector<int64_t> segments() const {
    std::vector<int64_t> result;
    for (size_t i = 0; i < lengths.size(); ++i) {
      result.insert(result.end(), lengths[i], static_cast<int64_t>(i));
    }
    result.resize(total_tokens, static_cast<int64_t>(lengths.size()));
    return result;
  }
};

std::vector<Pack> packs() {
  std::vector<Pack> result = {
      Pack({2, 3}, 1),       Pack({}, 0),           Pack({}, 4),           Pack({0}, 0),
      Pack({0, 0, 0}, 2),    Pack({1}, 0),          Pack({1, 1, 1, 1}, 0), Pack({1000}, 0),
      Pack({0, 5, 0, 0}, 3), Pack({0, 0, 7, 0}, 0), Pack({4, 4, 4}, 0),
  };
  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    std::vector<int32_t> lengths(random() % 40);
    for (int32_t& length : lengths) length = static_cast<int32_t>(random() % 6);
    result.emplace_back(lengths, static_cast<int32_t>(random() % 4));
  }
  return result;
}

TEST(SeqLens, WorkedExampleOfTheHeader) {
  const Pack pack({2, 3}, 1);
  const cuseq::SeqLens seqlens = pack.view();
  const std::vector<int64_t> segments = {0, 0, 1, 1, 1, 2};
  const std::vector<int64_t> positions = {0, 1, 0, 1, 2, 0};
  for (int64_t token = 0; token < 6; ++token) {
    const int64_t segment = seqlens.segment_of(token);
    EXPECT_EQ(segment, segments[token]);
    EXPECT_EQ(token - seqlens.begin(segment), positions[token]);
  }
  EXPECT_EQ(seqlens.tail_begin(), 5);
}

TEST(SeqLens, SegmentOfEveryToken) {
  for (const Pack& pack : packs()) {
    const std::vector<int64_t> segments = pack.segments();
    const int64_t n_seqs = pack.view().n_seqs;
    for (int64_t token = 0; token < pack.total_tokens; ++token) {
      const int64_t expected = segments[token];
      ASSERT_EQ(pack.view().segment_of(token), expected);
      // Any search range that contains the answer gives the same result.
      ASSERT_EQ(pack.view().segment_of(token, expected, expected), expected);
      ASSERT_EQ(pack.view().segment_of(token, 0, expected), expected);
      ASSERT_EQ(pack.view().segment_of(token, expected, n_seqs), expected);
    }
  }
}

TEST(SeqLens, SearchStaysInItsRangeWhateverTheOffsets) {
  std::mt19937 random(11);
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> offsets(1 + random() % 30);
    for (int32_t& offset : offsets) offset = static_cast<int32_t>(random());
    const auto n_seqs = static_cast<int64_t>(offsets.size()) - 1;
    const cuseq::SeqLens seqlens{offsets.data(), n_seqs};
    const int64_t low = random() % (n_seqs + 1);
    const int64_t high = low + random() % (n_seqs - low + 1);
    for (const int64_t token : {int64_t{0}, int64_t{70}, int64_t{kInt32Max}}) {
      const int64_t found = seqlens.segment_of(token, low, high);
      ASSERT_GE(found, low);
      ASSERT_LE(found, high);
    }
  }
}

TEST(SeqLens, LabelsThatCrossABoundary) {
  for (const Pack& pack : packs()) {
    const std::vector<int64_t> segments = pack.segments();
    const int64_t tail = pack.view().n_seqs;
    const cuseq::Segments whole{pack.view(), nullptr, pack.total_tokens};
    for (int64_t token = 0; token < pack.total_tokens; ++token) {
      const bool first = token == 0 || segments[token - 1] != segments[token];
      const bool last = token + 1 == pack.total_tokens || segments[token + 1] != segments[token];
      const bool in_tail = segments[token] == tail;
      ASSERT_EQ(whole.label_crosses_boundary(token, false), in_tail || first);
      ASSERT_EQ(whole.label_crosses_boundary(token, true), in_tail || last);
    }
  }
}

TEST(Bounds, LengthsAreClampedJustAboveTheLimit) {
  EXPECT_EQ(cuseq::bounded_length(-1, 10), 0);
  EXPECT_EQ(cuseq::bounded_length(kInt64Min, 10), 0);
  EXPECT_EQ(cuseq::bounded_length(0, 10), 0);
  EXPECT_EQ(cuseq::bounded_length(10, 10), 10);
  // Above the limit, so that a sum still shows the overflow, yet small enough to be summed.
  EXPECT_EQ(cuseq::bounded_length(11, 10), 11);
  EXPECT_EQ(cuseq::bounded_length(kInt64Max, 10), 11);
  const int64_t most = cuseq::bounded_length(kInt64Max, kInt32Max);
  EXPECT_LE(most, kInt64Max / kInt32Max);
}

TEST(Bounds, OffsetsStopAtTheLimit) {
  EXPECT_EQ(cuseq::bounded_offset(0, 10), 0);
  EXPECT_EQ(cuseq::bounded_offset(10, 10), 10);
  EXPECT_EQ(cuseq::bounded_offset(11, 10), 10);
  EXPECT_EQ(cuseq::bounded_offset(kInt64Max, kInt32Max), kInt32Max);
}

TEST(Positions, TextRestartsWhereThePreviousPositionDoesNotLeadOn) {
  EXPECT_FALSE(cuseq::position_restarts(0, 1, false));
  EXPECT_FALSE(cuseq::position_restarts(41, 42, false));
  EXPECT_FALSE(cuseq::position_restarts(-1, 0, false));
  EXPECT_TRUE(cuseq::position_restarts(0, 0, false));
  EXPECT_TRUE(cuseq::position_restarts(7, 0, false));
  EXPECT_TRUE(cuseq::position_restarts(7, 5, false));
  EXPECT_TRUE(cuseq::position_restarts(7, 9, false));
}

TEST(Positions, PlanesRepeatAndJumpInsideASequence) {
  EXPECT_FALSE(cuseq::position_restarts(3, 4, true));
  EXPECT_FALSE(cuseq::position_restarts(3, 3, true));
  EXPECT_FALSE(cuseq::position_restarts(3, 9, true));
  EXPECT_TRUE(cuseq::position_restarts(3, 0, true));
  EXPECT_TRUE(cuseq::position_restarts(3, 2, true));
  EXPECT_TRUE(cuseq::position_restarts(0, 0, true));
}

TEST(Positions, ExtremesDoNotOverflow) {
  EXPECT_TRUE(cuseq::position_restarts(kInt32Max, kInt32Min, false));
  EXPECT_TRUE(cuseq::position_restarts(kInt64Min, kInt64Max, false));
  EXPECT_FALSE(cuseq::position_restarts(kInt64Max - 1, kInt64Max, false));
  EXPECT_TRUE(cuseq::position_restarts(kInt64Max, kInt64Min, false));
  EXPECT_TRUE(cuseq::position_restarts(kInt64Max, kInt64Min, true));
  EXPECT_FALSE(cuseq::position_restarts(kInt64Min, kInt64Max, true));
}

TEST(ZigzagPosition, EveryRankHoldsItsTwoParts) {
  std::vector<int64_t> first, second;
  for (int64_t i = 0; i < 4; ++i) {
    first.push_back(cuseq::zigzag_position(i, /*length=*/8, /*cp_size=*/2, /*cp_rank=*/0));
    second.push_back(cuseq::zigzag_position(i, /*length=*/8, /*cp_size=*/2, /*cp_rank=*/1));
  }
  EXPECT_EQ(first, (std::vector<int64_t>{0, 1, 6, 7}));
  EXPECT_EQ(second, (std::vector<int64_t>{2, 3, 4, 5}));
}

TEST(ZigzagPosition, RanksTogetherHoldEveryPositionOnce) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (const int64_t length : {2 * ranks, 6 * ranks, 20 * ranks}) {
      std::vector<int> held(length, 0);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (int64_t i = 0; i < length / ranks; ++i) {
          ++held.at(cuseq::zigzag_position(i, length, ranks, rank));
        }
      }
      EXPECT_EQ(held, std::vector<int>(length, 1)) << ranks << " ranks, length " << length;
    }
  }
}

// Lengths 2 and 3 in segments of 4, and a tail of one token.
TEST(Segments, RealTokensAndTheirRanks) {
  const std::vector<int32_t> real = {0, 2, 5};
  const std::vector<int32_t> padded = {0, 4, 8};
  const cuseq::Segments segments{{padded.data(), 2}, real.data(), 9};
  const std::vector<int64_t> ranks = {0, 1, -1, -1, 2, 3, 4, -1, -1};
  for (int64_t token = 0; token < 9; ++token) {
    const int64_t segment = segments.seqlens.segment_of(token);
    EXPECT_EQ(segments.is_real(token, segment), ranks[token] >= 0) << token;
    EXPECT_EQ(segments.rank_of(token), ranks[token]) << token;
    if (ranks[token] >= 0) EXPECT_EQ(segments.place_of(ranks[token]), token);
  }
  EXPECT_EQ(segments.place_of(5), -1);
  EXPECT_EQ(segments.real_end(0), 2);
  EXPECT_EQ(segments.real_end(1), 7);
  // Crossing labels: the first token of a sequence (the last `shift` if labels are shifted), and
  // all padding.
  EXPECT_TRUE(segments.label_crosses_boundary(4, 0));
  EXPECT_FALSE(segments.label_crosses_boundary(1, 0));
  EXPECT_TRUE(segments.label_crosses_boundary(1, 1));
  EXPECT_TRUE(segments.label_crosses_boundary(2, 1));
  EXPECT_FALSE(segments.label_crosses_boundary(0, 1));
  EXPECT_FALSE(segments.label_crosses_boundary(4, 2));
  EXPECT_TRUE(segments.label_crosses_boundary(5, 2));
  EXPECT_TRUE(segments.label_crosses_boundary(4, 3));
  EXPECT_TRUE(segments.label_crosses_boundary(4, std::numeric_limits<int64_t>::max()));
}

TEST(Segments, StayInsideTheRowWhateverTheOffsets) {
  std::mt19937 random(13);
  for (int round = 0; round < 500; ++round) {
    const auto n_seqs = static_cast<int64_t>(random() % 20);
    std::vector<int32_t> real(n_seqs + 1), padded(n_seqs + 1);
    for (int32_t& offset : real) offset = static_cast<int32_t>(random());
    for (int32_t& offset : padded) offset = static_cast<int32_t>(random());
    const cuseq::Segments segments{{padded.data(), n_seqs}, real.data(), 70};
    for (int64_t token = 0; token < 70; ++token) {
      const int64_t place = segments.place_of(token);
      ASSERT_GE(place, -1);
      ASSERT_LT(place, 70);
    }
  }
}

TEST(GreatestCommonDivisor, ZeroAddsNothing) {
  EXPECT_EQ(cuseq::greatest_common_divisor(12, 18), 6);
  EXPECT_EQ(cuseq::greatest_common_divisor(0, 5), 5);
  EXPECT_EQ(cuseq::greatest_common_divisor(5, 0), 5);
  EXPECT_EQ(cuseq::greatest_common_divisor(0, 0), 0);
}

}  // namespace
