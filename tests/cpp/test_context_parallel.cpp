// Plans of context parallelism, compared with plain loops.
#include "context_parallel/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "context_parallel/share.h"

namespace {

using cuseq::RankMetaSlot;
using namespace cuseq::cp;

using Values = std::vector<int64_t>;

Row row_of(Values lengths, int64_t total_tokens, int64_t multiple = 1) {
  Row row;
  row.total_tokens = total_tokens;
  int64_t tail = total_tokens;
  for (const int64_t length : lengths) {
    row.segments.push_back((length + multiple - 1) / multiple * multiple);
    tail -= row.segments.back();
  }
  row.lengths = std::move(lengths);
  row.lengths.push_back(0);
  row.segments.push_back(tail);
  return row;
}

Options options_of(int64_t cp_size, Policy policy, int64_t window = 0) {
  Options options;
  options.cp_size = cp_size;
  options.policy = policy;
  options.heads = 16;
  options.key_heads = 8;
  options.window = window;
  return options;
}

// A key's place: its document and its position there.
using Key = std::pair<int32_t, int32_t>;

// Return the real tokens of a rank in its order.
std::vector<Key> tokens_of(const Plan& plan, int64_t rank) {
  std::vector<Key> tokens;
  for (const Piece& piece : plan.deal[rank]) {
    for (int32_t i = piece.begin; i < piece.end; ++i) {
      if (i < plan.row.lengths[piece.segment]) tokens.emplace_back(piece.segment, i);
    }
  }
  return tokens;
}

int64_t visible(int32_t position, int64_t window) {
  return window == 0 ? position + 1 : std::min<int64_t>(position + 1, window);
}

void check_deal(const Plan& plan) {
  std::vector<int32_t> tokens = plan.tokens();
  ASSERT_EQ(static_cast<int64_t>(tokens.size()), plan.row.total_tokens);
  std::sort(tokens.begin(), tokens.end());
  for (size_t i = 0; i < tokens.size(); ++i) ASSERT_EQ(tokens[i], static_cast<int32_t>(i));
  for (const Pieces& pieces : plan.deal) {
    int64_t held = 0;
    std::map<int32_t, int> pieces_of;
    for (const Piece& piece : pieces) {
      ASSERT_LT(piece.begin, piece.end);
      held += piece.size();
      if (real_part(plan.row, piece).size() > 0) ++pieces_of[piece.segment];
    }
    ASSERT_EQ(held, plan.tokens_per_rank());
    for (const auto& [document, count] : pieces_of) ASSERT_LE(count, 2);
  }
}

const int32_t* sent_section(const Share& share) {
  return share.rows.data() + 2 * (share.at(RankMetaSlot::kPieceCapacity) + 1) +
         share.at(RankMetaSlot::kKeyCapacity);
}

// Check that the terms of each source are the keys and sent rows that are copies of it, ascending.
void check_terms(const Share& share, int32_t num_sources) {
  const int32_t* sent = sent_section(share);
  const int32_t* keys = sent - share.at(RankMetaSlot::kKeyCapacity);
  const int32_t* offsets = sent + share.at(RankMetaSlot::kSendCapacity);
  const int32_t* terms = offsets + share.at(RankMetaSlot::kSourceCapacity) + 1;
  const int32_t num_keys = share.at(RankMetaSlot::kNumKeyRows);
  std::vector<std::vector<int32_t>> expected(num_sources);
  for (int32_t i = 0; i < num_keys; ++i) {
    if (keys[i] >= 0) expected.at(keys[i]).push_back(i);
  }
  for (int32_t i = 0; i < share.at(RankMetaSlot::kNumSentRows); ++i) {
    if (sent[i] >= 0) expected.at(sent[i]).push_back(num_keys + i);
  }
  for (int32_t source = 0; source < num_sources; ++source) {
    ASSERT_EQ(std::vector<int32_t>(terms + offsets[source], terms + offsets[source + 1]),
              expected[source]);
  }
}

// Send the rows as the shares say and check that each cut piece gets exactly its keys, in order.
void check_shares(const Plan& plan, int64_t max_seqs) {
  const int64_t ranks = plan.options.cp_size;
  std::vector<Share> shares;
  std::vector<std::vector<Key>> own;
  std::vector<std::vector<std::vector<Key>>> sent(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    shares.push_back(share_of(plan, rank, max_seqs));
    own.push_back(tokens_of(plan, rank));
    const Share& share = shares.back();
    ASSERT_EQ(static_cast<int64_t>(share.rows.size()), Capacities::of(plan, max_seqs).total());
    const int32_t* rows = sent_section(share);
    for (int64_t peer = 0; peer < ranks; ++peer) {
      std::vector<Key> message;
      for (int32_t i = 0; i < share.meta[static_cast<size_t>(RankMetaSlot::kSize) + peer]; ++i) {
        message.push_back(own[rank].at(*rows++));
      }
      sent[rank].push_back(message);
    }
  }
  int64_t pairs = 0, far_rows = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Share& share = shares[rank];
    std::vector<Key> sources(own[rank].begin(),
                             own[rank].begin() + share.at(RankMetaSlot::kNumCutTokens));
    for (int64_t peer = 0; peer < ranks; ++peer) {
      const auto& message = sent[peer][rank];
      ASSERT_EQ(static_cast<int32_t>(message.size()),
                share.meta[static_cast<size_t>(RankMetaSlot::kSize) + ranks + peer]);
      sources.insert(sources.end(), message.begin(), message.end());
    }
    far_rows += share.at(RankMetaSlot::kNumFarRows);
    check_terms(share, static_cast<int32_t>(sources.size()));
    ASSERT_EQ(share.at(RankMetaSlot::kNumTokens), static_cast<int32_t>(own[rank].size()));
    const int32_t* queries = share.rows.data();
    const int32_t capacity = share.at(RankMetaSlot::kPieceCapacity);
    const int32_t* keys = queries + capacity + 1;
    const int32_t* rows = keys + capacity + 1;
    for (int32_t piece = 0; piece < share.at(RankMetaSlot::kNumPieces); ++piece) {
      const Key first = own[rank].at(queries[piece]);
      const Key last = own[rank].at(queries[piece + 1] - 1);
      ASSERT_EQ(first.first, last.first);
      for (int32_t i = first.second; i <= last.second; ++i)
        pairs += visible(i, plan.options.window);
      if (piece >= share.at(RankMetaSlot::kNumCut)) {
        ASSERT_EQ(first.second, 0);
        ASSERT_EQ(last.second + 1, plan.row.lengths[first.first]);
        continue;
      }
      const int32_t begin = static_cast<int32_t>(first_key(first.second, plan.options.window));
      const int32_t end = last.second + 1;
      ASSERT_EQ(keys[piece + 1] - keys[piece], end - begin);
      for (int32_t i = 0; i < keys[piece + 1] - keys[piece]; ++i) {
        ASSERT_EQ(sources.at(rows[keys[piece] + i]), Key(first.first, begin + i));
      }
    }
    ASSERT_EQ(share.at(RankMetaSlot::kNumKeyRows), keys[capacity]);
  }
  EXPECT_EQ(pairs, plan.costs.pairs);
  EXPECT_EQ(far_rows, plan.costs.far_rows);
}

// Send the rows of shares that have room, and check that each cut piece gets exactly its keys.
void check_shares_of_a_room(const Plan& plan, int64_t max_seqs, const Room& spare) {
  const int64_t ranks = plan.options.cp_size;
  Room room;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Share share = share_of(plan, rank, max_seqs);
    const auto grow = [](int64_t& most, int64_t number) { most = std::max(most, number); };
    grow(room.whole, share.at(RankMetaSlot::kNumPieces) - share.at(RankMetaSlot::kNumCut));
    grow(room.cut, share.at(RankMetaSlot::kNumCut));
    grow(room.cut_tokens, share.at(RankMetaSlot::kNumCutTokens));
    grow(room.keys, share.at(RankMetaSlot::kNumKeyRows));
    for (auto i = static_cast<size_t>(RankMetaSlot::kSize); i < share.meta.size(); ++i) {
      grow(room.far, share.meta[i]);
    }
  }
  const Room most = most_room(plan, max_seqs);
  room.whole = std::min(room.whole + spare.whole, most.whole);
  room.cut = std::min(room.cut + spare.cut, most.cut);
  room.cut_tokens = std::min(room.cut_tokens + spare.cut_tokens, most.cut_tokens);
  room.keys = std::min(room.keys + spare.keys, most.keys);
  room.far = std::min(room.far + spare.far, most.far);
  const Key none{-1, -1};
  std::vector<Share> shares;
  std::vector<std::vector<Key>> own;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    shares.push_back(share_of(plan, rank, max_seqs, room));
    own.push_back(tokens_of(plan, rank));
    ASSERT_EQ(static_cast<int64_t>(shares.back().rows.size()),
              Capacities::of(plan, max_seqs).total());
  }
  const auto place_of = [](int64_t of, int64_t peer) { return peer < of ? peer : peer - 1; };
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Share& share = shares[rank];
    const Share exact = share_of(plan, rank, max_seqs);
    const int64_t cut = exact.at(RankMetaSlot::kNumCut);
    const int64_t pieces = exact.at(RankMetaSlot::kNumPieces);
    std::vector<Key> sources(
        own[rank].begin(),
        own[rank].begin() + std::min<int64_t>(room.cut_tokens, own[rank].size()));
    sources.resize(room.cut_tokens, none);
    for (int64_t peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      const int32_t* sent = sent_section(shares[peer]) + place_of(peer, rank) * room.far;
      for (int64_t i = 0; i < room.far; ++i) {
        sources.push_back(sent[i] < 0 ? none : own[peer].at(sent[i]));
      }
    }
    check_terms(share, static_cast<int32_t>(sources.size()));
    EXPECT_EQ(share.at(RankMetaSlot::kOfReplays), 1);
    EXPECT_EQ(share.at(RankMetaSlot::kNumPieces), room.cut + room.whole);
    EXPECT_EQ(share.at(RankMetaSlot::kNumCut), room.cut);
    EXPECT_EQ(share.at(RankMetaSlot::kNumCutTokens), room.cut_tokens);
    EXPECT_EQ(share.at(RankMetaSlot::kNumKeyRows), room.keys);
    EXPECT_EQ(share.at(RankMetaSlot::kNumFarRows), (ranks - 1) * room.far);
    EXPECT_EQ(share.at(RankMetaSlot::kAnyFar), room.far > 0 && ranks > 1);
    const int32_t capacity = share.at(RankMetaSlot::kPieceCapacity);
    const int32_t* queries = share.rows.data();
    const int32_t* keys = queries + capacity + 1;
    const int32_t* rows = keys + capacity + 1;
    const int32_t* exact_queries = exact.rows.data();
    const int32_t* exact_keys = exact_queries + capacity + 1;
    for (int64_t piece = 0; piece <= room.cut; ++piece) {
      ASSERT_EQ(queries[piece], exact_queries[std::min(piece, cut)]);
      ASSERT_EQ(keys[piece], exact_keys[std::min(piece, cut)]);
    }
    for (int64_t piece = 0; piece <= room.whole; ++piece) {
      ASSERT_EQ(queries[room.cut + piece], exact_queries[std::min(cut + piece, pieces)]);
    }
    for (int64_t piece = 0; piece < cut; ++piece) {
      const Key first = own[rank].at(queries[piece]);
      const auto begin = static_cast<int32_t>(first_key(first.second, plan.options.window));
      for (int32_t i = 0; i < keys[piece + 1] - keys[piece]; ++i) {
        ASSERT_EQ(sources.at(rows[keys[piece] + i]), Key(first.first, begin + i));
      }
    }
    for (int64_t i = exact.at(RankMetaSlot::kNumKeyRows); i < room.keys; ++i) {
      ASSERT_EQ(rows[i], -1);
    }
  }
  const auto lacks = [&](int64_t Room::* number) {
    Room less = room;
    if (--(less.*number) < 0) return;
    bool raised = false;
    for (int64_t rank = 0; rank < ranks && !raised; ++rank) {
      try {
        share_of(plan, rank, max_seqs, less);
      } catch (const std::invalid_argument&) {
        raised = true;
      }
    }
    EXPECT_TRUE(raised);
  };
  const bool is_tight = spare.whole + spare.cut + spare.cut_tokens + spare.keys + spare.far == 0;
  if (!is_tight) return;
  for (const auto number : {&Room::whole, &Room::cut, &Room::cut_tokens, &Room::keys, &Room::far}) {
    lacks(number);
  }
}

TEST(ContextParallelPlan, RoomHasItsLimits) {
  const Plan plan = make_plan(row_of({2, 6}, 10), options_of(2, Policy::kContiguous));
  Room room = most_room(plan, 2);
  EXPECT_NO_THROW(share_of(plan, 0, 2, room));
  for (const auto number : {&Room::whole, &Room::cut, &Room::cut_tokens, &Room::keys, &Room::far}) {
    Room more = room;
    ++(more.*number);
    EXPECT_THROW(share_of(plan, 0, 2, more), std::invalid_argument);
    more.*number = -1;
    EXPECT_THROW(share_of(plan, 0, 2, more), std::invalid_argument);
  }
}

TEST(ContextParallelPlan, TheWorkedExample) {
  const Plan plan = make_plan(row_of({2, 6}, 10), options_of(2, Policy::kContiguous));
  EXPECT_EQ(plan.deal[0], (Pieces{{1, 0, 3}, {0, 0, 2}}));
  EXPECT_EQ(plan.deal[1], (Pieces{{1, 3, 6}, {2, 0, 2}}));
  EXPECT_EQ(plan.tokens(), (std::vector<int32_t>{2, 3, 4, 0, 1, 5, 6, 7, 8, 9}));
  EXPECT_EQ(plan.num_whole, 1);
  EXPECT_EQ(plan.num_cut, 1);
  EXPECT_EQ(plan.costs.far_rows, 3);
}

TEST(ContextParallelPlan, AnyRow) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const int64_t ranks = 1 + random() % 8;
    const int64_t multiple = random() % 2 == 0 ? 1 : 2 * ranks;
    const int64_t window = random() % 3 == 0 ? 1 + random() % 20 : 0;
    Values lengths;
    int64_t tokens = 0;
    for (uint32_t n = random() % 7; n > 0; --n) {
      const uint32_t longest = random() % 2 == 0 ? 8 : 120;
      lengths.push_back(random() % longest);
      tokens += (lengths.back() + multiple - 1) / multiple * multiple;
    }
    const int64_t parts = multiple == 1 ? ranks : 2 * ranks;
    const int64_t total = (tokens + parts - 1) / parts * parts + parts * (random() % 3);
    for (const Policy policy : {Policy::kAuto, Policy::kContiguous, Policy::kZigzag}) {
      if (policy == Policy::kZigzag && multiple == 1) continue;
      const Row row = row_of(lengths, total, multiple);
      const Plan plan = make_plan(row, options_of(ranks, policy, window));
      SCOPED_TRACE(testing::Message() << "round " << round << ", policy " << int(policy));
      check_deal(plan);
      const auto max_seqs = static_cast<int64_t>(lengths.size());
      check_shares(plan, max_seqs);
      check_shares_of_a_room(plan, max_seqs, {});
      check_shares_of_a_room(plan, max_seqs, {3, 2, 17, 21, 5});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ContextParallelPlan, UlyssesKeepsTheOrderOfTheRow) {
  const Plan plan = make_plan(row_of({3, 6}, 12), options_of(2, Policy::kUlysses));
  std::vector<int32_t> expected(12);
  for (int32_t i = 0; i < 12; ++i) expected[i] = i;
  EXPECT_EQ(plan.tokens(), expected);
  const Share share = share_of(plan, 1, 4);
  EXPECT_EQ(share.rows, (std::vector<int32_t>{0, 3, 9, 9, 9, 0, 3, 9, 9, 9, 0}));
  EXPECT_EQ(share.at(RankMetaSlot::kUlysses), 1);
  EXPECT_EQ(share.at(RankMetaSlot::kLongestWhole), 6);
}

TEST(ContextParallelPlan, UlyssesKeepsTheOrderOfAnyRow) {
  std::mt19937 random(11);
  for (int round = 0; round < 500; ++round) {
    const int64_t ranks = 1 + random() % 8;
    const int64_t multiple = 1 + random() % 9;
    Values lengths, starts{0}, offsets{0};
    for (uint32_t n = random() % 7; n > 0; --n) {
      lengths.push_back(random() % 40);
      if (lengths.back() == 0) continue;
      starts.push_back(starts.back() + (lengths.back() + multiple - 1) / multiple * multiple);
      offsets.push_back(offsets.back() + lengths.back());
    }
    const int64_t total = (starts.back() + random() % 20 + ranks - 1) / ranks * ranks;
    const Plan plan =
        make_plan(row_of(lengths, total, multiple), options_of(ranks, Policy::kUlysses));
    check_deal(plan);
    ASSERT_TRUE(std::ranges::is_sorted(plan.tokens()));
    const Share share = share_of(plan, ranks - 1, 7);
    const auto section = [&](int64_t begin) {
      return Values(share.rows.begin() + begin, share.rows.begin() + begin + 8);
    };
    offsets.resize(8, offsets.back());
    starts.resize(8, starts.back());
    ASSERT_EQ(section(0), offsets);
    ASSERT_EQ(section(8), starts);
  }
}

TEST(ContextParallelPlan, TheHashIsOfWhatRanksMustAgreeOn) {
  const auto hash_of = [](Values lengths, Policy policy, int64_t window = 0) {
    return make_plan(row_of(std::move(lengths), 32), options_of(2, policy, window)).hash;
  };
  const uint64_t hash = hash_of({9, 7, 16}, Policy::kContiguous);
  EXPECT_EQ(hash_of({9, 7, 16}, Policy::kContiguous), hash);
  EXPECT_NE(hash_of({9, 16, 7}, Policy::kContiguous), hash);
  EXPECT_NE(hash_of({9, 7, 16}, Policy::kUlysses), hash);
  EXPECT_NE(hash_of({9, 7, 16}, Policy::kContiguous, 4), hash);
  // The same on every platform.
  EXPECT_EQ(hash_of({32}, Policy::kZigzag), 2523953300649714144U);
}

TEST(ContextParallelCost, PairsAreCounted) {
  for (int64_t window = 0; window < 300; window += 37) {
    for (int64_t begin = 0; begin < 400; begin += 31) {
      for (int64_t end = begin; end < 900; end += 57) {
        int64_t pairs = 0;
        for (int64_t i = begin; i < end; ++i) pairs += visible(static_cast<int32_t>(i), window);
        ASSERT_EQ(pairs_of(begin, end, window), pairs);
        int64_t tiles = 0;
        for (int64_t tile = begin; tile < end; tile += 128) {
          const int64_t last = std::min(tile + 128, end);
          tiles += (last + 63) / 64 - first_key(tile, window) / 64;
        }
        ASSERT_EQ(tiled_pairs_of(begin, end, window), tiles * 128 * 64)
            << begin << " to " << end << ", window " << window;
      }
    }
  }
}

}  // namespace
