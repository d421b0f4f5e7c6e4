// Tests of trees of samples without torch: nodes, the calls of attention, and shared prefixes.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trees/tree.h"

namespace {

using cuseq::trees::Calls;
using cuseq::trees::calls_of;
using cuseq::trees::Sequence;
using cuseq::trees::share_prefixes;
using cuseq::trees::SharedTree;
using cuseq::trees::Tree;
using cuseq::trees::tree_of_nodes;

using Longs = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

Tree tree_of(const Longs& lengths, const Longs& parents) {
  std::string why;
  const auto tree = tree_of_nodes(lengths, parents, &why);
  EXPECT_TRUE(tree.has_value()) << why;
  return tree.value_or(Tree{});
}

TEST(Trees, NodesKnowTheirPaths) {
  const Tree tree = tree_of({3, 2, 1, 4}, {-1, 0, 0, -1});
  EXPECT_EQ(tree.begins, Ints({0, 3, 5, 6, 10}));
  EXPECT_EQ(tree.ends, Ints({6, 5, 6, 10}));
  EXPECT_EQ(tree.positions, Ints({0, 3, 3, 0}));
  EXPECT_EQ(tree.depths, Ints({0, 1, 1, 0}));
  EXPECT_EQ(tree.samples, Ints({1, 2, 3}));
  EXPECT_EQ(tree.path(1), Ints({0, 2}));
  EXPECT_EQ(tree.longest_path(), 5);
}

TEST(Trees, NodesOutOfOrderAreRefused) {
  std::string why;
  EXPECT_FALSE(tree_of_nodes(Longs{1, 1, 1}, Longs{-1, -1, 0}, &why).has_value());
  EXPECT_NE(why.find("parents[2] = 0"), std::string::npos);
}

TEST(Trees, ACallHasPairsWithoutQueriesAndWithoutKeys) {
  // Two groups: tokens [0, 3) are seen by [3, 6), and [6, 8) by [8, 9).
  const Tree tree = tree_of({3, 2, 1, 2, 1}, {-1, 0, 0, -1, 3});
  const Calls calls = calls_of(tree, /*max_seqs=*/8, /*max_depth=*/1, /*total_tokens=*/10);
  EXPECT_EQ(calls.queries, Ints({3, 6, 8, 8, 9}));
  EXPECT_EQ(calls.keys, Ints({0, 3, 3, 6, 8}));
  EXPECT_LE(static_cast<int64_t>(calls.queries.size()), calls.offsets_capacity());
  const int32_t* call = calls.meta.data() + cuseq::kTreeMetaHead;
  EXPECT_EQ(call[cuseq::kCallPairs], 4);
  EXPECT_EQ(call[cuseq::kCallQueryEnd], 9);
  EXPECT_EQ(call[cuseq::kCallKeyEnd], 8);
}

TEST(Trees, CapacitiesAreEnoughForChains) {
  const Tree tree = tree_of(Longs(20, 1), [] {
    Longs parents;
    for (int64_t i = 0; i < 20; ++i) parents.push_back(i - 1);
    return parents;
  }());
  const Calls calls = calls_of(tree, 20, 19, 20);
  EXPECT_EQ(calls.meta[cuseq::kTreeDepth], 19);
  EXPECT_LE(static_cast<int64_t>(calls.queries.size()), calls.offsets_capacity());
}

SharedTree shared(const std::vector<Longs>& sequences, int64_t min_shared) {
  std::vector<Sequence> views;
  for (const Longs& one : sequences) {
    views.push_back({one.data(), nullptr, static_cast<int64_t>(one.size())});
  }
  return share_prefixes(views, min_shared);
}

TEST(Trees, PrefixesAreSharedOnce) {
  const SharedTree found = shared({{1, 2, 3, 4}, {1, 2, 5}, {1, 2}, {1, 2, 3, 4}, {}}, 1);
  EXPECT_EQ(found.tree.tokens(), 5);
  EXPECT_EQ(found.tree.samples, Ints({1, 2, 0, 1, 3}));
  EXPECT_EQ(found.tree.path_length(1), 3);
}

TEST(Trees, ShortPrefixesAreRepeated) {
  const SharedTree found = shared({{1, 2, 3, 4, 5}, {1, 2, 3, 4, 6}, {1, 7}}, 3);
  // [1] is too short to share, [1 2 3 4] with it is not.
  EXPECT_EQ(found.tree.begins, Ints({0, 4, 5, 6, 8}));
  EXPECT_EQ(found.tree.parents, Ints({-1, 0, 0, -1}));
}

}  // namespace
