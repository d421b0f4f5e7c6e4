// Tests of cuseq/masks.h (free of torch) against loops over all pairs, and of the mask ops without
// Python.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuseq/cache.h"
#include "cuseq/masks.h"
#include "cuseq/ops.h"
#include "tensors.h"

namespace {

using cuseq::BlockRange;
using cuseq::KeyRange;
using cuseq::MaskRule;
using cuseq_tests::ints;
using cuseq_tests::Values;
using cuseq_tests::values_of;

// A packed row whose segments may be longer than their sequences, and a pairwise reference.
struct Pack {
  std::vector<int32_t> real = {0};
  std::vector<int32_t> padded = {0};
  std::vector<int32_t> spans;
  std::vector<int64_t> segment_of;  // -1 on padding and tail
  bool causal = true;
  int64_t window = 0;

  explicit Pack(std::mt19937& random) {
    const auto below = [&](uint32_t bound) { return static_cast<int32_t>(random() % bound); };
    const int32_t sequences = below(6);
    for (int32_t i = 0; i < sequences; ++i) {
      const int32_t length = below(9);
      const int32_t begin = padded.back();
      real.push_back(real.back() + length);
      padded.push_back(begin + length + below(3));
      if (length >= 2 && below(2) == 0) {
        const int32_t start = below(length);
        spans.insert(spans.end(), {begin + start, begin + start + 1 + below(length - start)});
      }
      segment_of.resize(begin, -1);
      segment_of.resize(begin + length, i);
    }
    segment_of.resize(padded.back() + below(4), -1);
    causal = below(2) == 0;
    window = below(6);
  }

  MaskRule rule() const {
    MaskRule rule;
    rule.segments.seqlens = {padded.data(), static_cast<int64_t>(padded.size()) - 1};
    rule.segments.total_tokens = static_cast<int64_t>(segment_of.size());
    rule.segments.cu_seqlens_real = real.data();
    rule.causal = causal;
    rule.window = window;
    rule.spans = spans.data();
    rule.n_spans = static_cast<int64_t>(spans.size()) / 2;
    return rule;
  }

  bool sees(int64_t query, int64_t key) const {
    if (segment_of[query] < 0 || segment_of[key] < 0) return query == key;
    if (segment_of[query] != segment_of[key]) return false;
    for (size_t i = 0; i < spans.size(); i += 2) {
      const auto holds = [&](int64_t token) { return spans[i] <= token && token < spans[i + 1]; };
      if (holds(query) && holds(key)) return true;
    }
    if (causal && key > query) return false;
    return window == 0 || std::abs(query - key) < window;
  }
};

TEST(MaskRule, KeysAreThoseOfThePairs) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 500; ++trial) {
    const Pack pack(random);
    const MaskRule rule = pack.rule();
    for (int64_t query = 0; query < rule.segments.total_tokens; ++query) {
      const KeyRange keys = rule.keys_of(query, rule.segments.seqlens.segment_of(query));
      for (int64_t key = 0; key < rule.segments.total_tokens; ++key) {
        ASSERT_EQ(keys.first <= key && key < keys.end, pack.sees(query, key))
            << "trial " << trial << ", query " << query << ", key " << key;
      }
    }
  }
}

TEST(MaskRule, WrongValuesStayInsideTheRow) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  const std::vector<std::vector<int32_t>> numbers = {
      {kMost, kLeast, kMost}, {kLeast, kMost, 5}, {7, 3, 1}, {0, kMost, kMost}, {-5, 2, 100}};
  for (const auto& offsets : numbers) {
    for (const auto& others : numbers) {
      for (const bool causal : {true, false}) {
        MaskRule rule;
        rule.segments.seqlens = {offsets.data(), 2};
        rule.segments.total_tokens = 8;
        rule.segments.cu_seqlens_real = others.data();
        rule.causal = causal;
        rule.spans = others.data();
        rule.n_spans = 1;
        for (int64_t token = 0; token < rule.segments.total_tokens; ++token) {
          const KeyRange keys = rule.keys_of(token, rule.segments.seqlens.segment_of(token));
          EXPECT_GE(keys.first, 0);
          EXPECT_LE(keys.first, token);
          EXPECT_GT(keys.end, token);
          EXPECT_LE(keys.end, rule.segments.total_tokens);
        }
      }
    }
  }
}

TEST(BlockRange, IsThatOfThePairs) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    const Pack pack(random);
    const MaskRule rule = pack.rule();
    const int64_t tokens = rule.segments.total_tokens;
    const auto block = static_cast<int64_t>(1 + random() % 5);
    const int64_t begin = tokens == 0 ? 0 : static_cast<int64_t>(random() % tokens);
    const int64_t stop = std::min(begin + block, tokens);
    KeyRange any{tokens, 0};
    KeyRange all{0, tokens};
    for (int64_t query = begin; query < stop; ++query) {
      const KeyRange keys = rule.keys_of(query, rule.segments.seqlens.segment_of(query));
      any = {std::min(any.first, keys.first), std::max(any.end, keys.end)};
      all = {std::max(all.first, keys.first), std::min(all.end, keys.end)};
    }
    if (begin == stop) continue;
    const BlockRange range = BlockRange::of(any, all, block);
    for (int64_t first = 0; first < tokens; first += block) {
      bool sees = false;
      bool sees_all = first + block <= tokens;
      for (int64_t query = begin; query < stop; ++query) {
        for (int64_t key = first; key < std::min(first + block, tokens); ++key) {
          (pack.sees(query, key) ? sees : sees_all) = pack.sees(query, key);
        }
      }
      EXPECT_EQ(range.sees(first / block), sees);
      EXPECT_EQ(range.sees_all(first / block), sees_all);
    }
  }
}

TEST(Masks, WithoutPython) {
  const at::Tensor lengths = ints({2, 3});
  EXPECT_EQ(values_of(cuseq::mask_ranges({lengths, 6})),
            (Values{0, 0, 2, 2, 2, 5, 1, 2, 3, 4, 5, 6}));
  const at::Tensor mask = cuseq::dense_mask({ints({1, 1}), 2}, std::nullopt, at::kFloat, true);
  EXPECT_EQ(mask.sizes(), (at::IntArrayRef{1, 1, 2, 2}));
  EXPECT_EQ(mask.select(2, 0).select(2, 1).item<float>(), std::numeric_limits<float>::lowest());
  EXPECT_EQ(cuseq::block_mask(cuseq::mask_ranges({lengths, 6})).size(), 8);
}

TEST(Masks, AreMadeOnceThroughTheCache) {
  cuseq::IdentityCache& cache = cuseq::IdentityCache::instance();
  cache.clear();
  const at::Tensor lengths = ints({2, 3});
  const at::Tensor spans = ints({0, 2}, at::kInt).view({1, 2});
  cuseq::MaskOptions options{lengths, 6};
  const at::Tensor causal = cuseq::cached_dense_mask(options);
  EXPECT_TRUE(cuseq::cached_dense_mask(options, 6).is_same(causal)) << "one row is the default";
  options.window = 6;
  EXPECT_TRUE(cuseq::cached_dense_mask(options).is_same(causal)) << "a window that hides nothing";
  options.window = 2;
  EXPECT_FALSE(cuseq::cached_dense_mask(options).is_same(causal));
  options.window = std::nullopt;
  options.spans = spans;
  const at::Tensor spanned = cuseq::cached_dense_mask(options);
  EXPECT_TRUE(cuseq::cached_dense_mask(options).is_same(spanned));
  spans.fill_(0).select(1, 1).fill_(1);
  EXPECT_FALSE(cuseq::cached_dense_mask(options).is_same(spanned)) << "spans were edited";
  cache.clear();
}

}  // namespace
