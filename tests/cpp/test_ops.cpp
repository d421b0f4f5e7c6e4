// The C++ API: cuseq/ops.h and cuseq/cache.h, as a program without Python uses them.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "cuseq/seqlens.h"

namespace {

using cuseq::IdentityCache;

at::Tensor ints(std::vector<int64_t> values, at::ScalarType dtype = at::kLong) {
  return at::tensor(values, at::kLong).to(dtype);
}

std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).reshape(-1).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

using Values = std::vector<int64_t>;

template <typename Error, typename Call>
void expect_error(const Call& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown, expected: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
        << error.what_without_backtrace();
  }
}

TEST(Ops, LiteralCase) {
  for (const at::ScalarType dtype : {at::kInt, at::kLong}) {
    const at::Tensor lengths = ints({2, 3}, dtype);
    EXPECT_EQ(values_of(cuseq::cu_seqlens(lengths)), (Values{0, 2, 5}));
    EXPECT_EQ(values_of(cuseq::max_seqlen(lengths)), (Values{3}));
    EXPECT_EQ(cuseq::max_seqlen(lengths).dim(), 0);
    EXPECT_EQ(values_of(cuseq::last_token_indices(lengths)), (Values{1, 4}));
    EXPECT_EQ(values_of(cuseq::position_ids(lengths, 6)), (Values{0, 1, 0, 1, 2, 0}));
    EXPECT_EQ(values_of(cuseq::seq_ids(lengths, 6)), (Values{0, 0, 1, 1, 1, 2}));
    EXPECT_EQ(cuseq::cu_seqlens(lengths).scalar_type(), at::kInt);
    EXPECT_EQ(cuseq::position_ids(lengths, 6).scalar_type(), at::kInt);
  }
}

TEST(Ops, StridedAndEmptyLengths) {
  const at::Tensor column = ints({2, 9, 0, 9, 3, 9}).reshape({3, 2}).select(1, 0);
  ASSERT_FALSE(column.is_contiguous());
  EXPECT_EQ(values_of(cuseq::cu_seqlens(column)), (Values{0, 2, 2, 5}));
  EXPECT_EQ(values_of(cuseq::last_token_indices(column)), (Values{1, -1, 4}));
  EXPECT_EQ(values_of(cuseq::cu_seqlens(ints({}))), (Values{0}));
  EXPECT_EQ(values_of(cuseq::max_seqlen(ints({}))), (Values{0}));
  EXPECT_EQ(values_of(cuseq::seq_ids(ints({}), 2)), (Values{0, 0}));
}

TEST(Ops, ErrorsNameArgumentIndexAndValue) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  expect_error<c10::ValueError>([] { cuseq::cu_seqlens(ints({2, -3})); }, "lengths[1] = -3");
  expect_error<c10::ValueError>([] { cuseq::max_seqlen(ints({kMax, 1})); }, "lengths[1] = 1");
  expect_error<c10::ValueError>([] { cuseq::seq_ids(ints({2, 3}), 4); }, "total_tokens = 4");
  expect_error<c10::ValueError>([] { cuseq::position_ids(ints({2}), -1); }, "total_tokens");
  expect_error<c10::TypeError>([] { cuseq::cu_seqlens(at::ones({2})); }, "int32 or int64");
}

TEST(Ops, TheDispatcherKnowsThem) {
  for (const char* name :
       {"cuseq::cu_seqlens", "cuseq::max_seqlen", "cuseq::max_seqlen_sync",
        "cuseq::last_token_indices", "cuseq::position_ids", "cuseq::seq_ids",
        "cuseq::lengths_from_padding_mask", "cuseq::cu_seqlens_from_position_ids",
        "cuseq::mask_boundary_labels", "cuseq::varlen_attention", "cuseq::packed_cu_seqlens",
        "cuseq::packed_position_ids", "cuseq::packed_seq_ids"}) {
    EXPECT_TRUE(c10::Dispatcher::singleton().findSchema({name, ""}).has_value()) << name;
  }
}

TEST(Ops, AttentionStaysInsideItsSequence) {
  at::manual_seed(3);
  const auto rows = [] { return at::randn({6, 2, 8}, at::kDouble); };
  const at::Tensor query = rows();
  const at::Tensor key = rows();
  const at::Tensor value = rows();
  const at::Tensor offsets = ints({0, 2, 5}, at::kInt);
  const auto [out, logsumexp] = cuseq::varlen_attention(query, key, value, offsets, std::nullopt);
  EXPECT_EQ(logsumexp.sizes(), (c10::IntArrayRef{2, 6}));
  const auto heads_first = [](const at::Tensor& tensor, int64_t begin, int64_t end) {
    return tensor.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
  };
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 5}}) {
    const at::Tensor expected = at::scaled_dot_product_attention(
        heads_first(query, begin, end), heads_first(key, begin, end),
        heads_first(value, begin, end), {}, 0.0, /*is_causal=*/true);
    EXPECT_TRUE(at::allclose(heads_first(out, begin, end), expected));
  }
  EXPECT_EQ(out.slice(0, 5).abs().max().item<double>(), 0.0) << "the tail is zero";
}

TEST(HostCopies, HostTensorsAreThereAtOnce) {
  const at::Tensor meta = ints({2, 3, 6, 5, 0}, at::kInt);
  EXPECT_TRUE(cuseq::start_host_copy(meta).is_same(meta));
  cuseq::wait_host_copy(meta);
  EXPECT_EQ(cuseq::read_host_meta(meta, cuseq::kNumSeqs), 2);
  EXPECT_EQ(cuseq::read_host_meta(meta, cuseq::kMaxSeqlen), 3);
  EXPECT_EQ(cuseq::read_host_meta(meta, cuseq::kNumRealTokens), 5);
}

TEST(HostCopies, WrongMetaIsRefused) {
  const at::Tensor meta = ints({2, 3, 6, 5, 0}, at::kInt);
  for (const int64_t slot : {-1, 5}) {
    expect_error<c10::ValueError>([&] { cuseq::read_host_meta(meta, slot); }, "slot");
  }
  for (const at::Tensor& wrong : {meta.to(at::kLong), meta.slice(0, 0, 4), meta.unsqueeze(0),
                                  at::zeros({5, 2}, at::kInt).select(1, 0)}) {
    expect_error<c10::ValueError>([&] { cuseq::read_host_meta(wrong, 0); }, "host_meta");
  }
  const std::pair<int64_t, const char*> statuses[] = {
      {cuseq::kNegativeLength, "negative"},
      {cuseq::kSumAboveTotal, "total_tokens = 6"},
      {cuseq::kFirstOffsetNotZero, "start at 0"},
      {cuseq::kTooManySequences, "max_seqs"},
  };
  for (const auto& [status, part] : statuses) {
    expect_error<c10::ValueError>(
        [&] { cuseq::read_host_meta(ints({2, 3, 6, 5, status}, at::kInt), cuseq::kMaxSeqlen); },
        part);
  }
}

class Cache : public testing::Test {
 protected:
  void SetUp() override {
    IdentityCache::instance().clear();
    before_ = IdentityCache::instance().stats();
  }
  void TearDown() override { IdentityCache::instance().clear(); }

  // What changed since the test began, or since the last call.
  cuseq::CacheStats changes() {
    const cuseq::CacheStats now = IdentityCache::instance().stats();
    const cuseq::CacheStats change{now.hits - before_.hits,
                                   now.misses - before_.misses,
                                   now.bypasses - before_.bypasses,
                                   now.evictions - before_.evictions,
                                   now.bytes,
                                   now.entries};
    before_ = now;
    return change;
  }

 private:
  cuseq::CacheStats before_;
};

TEST_F(Cache, AHitIsTheSameTensor) {
  const at::Tensor lengths = ints({2, 3});
  const at::Tensor offsets = cuseq::packed_cu_seqlens(lengths);
  const at::Tensor positions = cuseq::packed_position_ids(lengths, 6);
  const at::Tensor longer = cuseq::packed_position_ids(lengths, 7);
  const at::Tensor segments = cuseq::packed_seq_ids(lengths, 6);
  EXPECT_TRUE(cuseq::packed_cu_seqlens(lengths).is_same(offsets));
  EXPECT_TRUE(cuseq::packed_position_ids(lengths, 6).is_same(positions));
  EXPECT_TRUE(cuseq::packed_position_ids(lengths, 7).is_same(longer));
  EXPECT_TRUE(cuseq::packed_seq_ids(lengths, 6).is_same(segments));
  EXPECT_EQ(values_of(positions), (Values{0, 1, 0, 1, 2, 0}));
  EXPECT_EQ(values_of(segments), (Values{0, 0, 1, 1, 1, 2}));
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.hits, 4);
  EXPECT_EQ(change.misses, 4);
  EXPECT_EQ(change.entries, 4);
  EXPECT_GE(change.bytes, 4 * (3 + 6 + 7 + 6));
}

TEST_F(Cache, EditsAreMisses) {
  const at::Tensor lengths = ints({2, 3});
  cuseq::packed_cu_seqlens(lengths);
  lengths.fill_(1);
  at::Tensor value = cuseq::packed_cu_seqlens(lengths);
  EXPECT_EQ(values_of(value), (Values{0, 1, 2}));
  value.fill_(9);
  EXPECT_EQ(values_of(cuseq::packed_cu_seqlens(lengths)), (Values{0, 1, 2}));
  lengths.set_data(ints({4, 5}));
  EXPECT_EQ(values_of(cuseq::packed_cu_seqlens(lengths)), (Values{0, 4, 9}));
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.hits, 0);
  EXPECT_EQ(change.misses, 4);
  EXPECT_EQ(change.entries, 1);
}

TEST_F(Cache, NothingIsPinned) {
  at::Tensor lengths = ints({2, 3});
  at::Tensor value = cuseq::packed_cu_seqlens(lengths);
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(value.getIntrusivePtr());
  value.reset();
  EXPECT_FALSE(watched.expired());
  lengths.reset();
  // Without a Python wrapper nobody hears of the key's death before the next call.
  EXPECT_EQ(changes().entries, 0);
  EXPECT_TRUE(watched.expired());
}

TEST_F(Cache, ADeadKeyGoesWithTheNextInsert) {
  at::Tensor lengths = ints({2, 3});
  at::Tensor value = cuseq::packed_cu_seqlens(lengths);
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(value.getIntrusivePtr());
  value.reset();
  lengths.reset();
  const at::Tensor other = ints({1});
  cuseq::packed_cu_seqlens(other);
  EXPECT_TRUE(watched.expired());
}

TEST_F(Cache, ScopesInvalidateAndClear) {
  IdentityCache& cache = IdentityCache::instance();
  const at::Tensor outside = ints({2, 3});
  const at::Tensor inside = ints({2, 3});
  const at::Tensor kept = cuseq::packed_cu_seqlens(outside);
  const uint64_t outer = cache.enter_scope();
  cuseq::packed_cu_seqlens(inside);
  const uint64_t inner = cache.enter_scope();
  cuseq::packed_seq_ids(inside, 6);
  EXPECT_EQ(changes().entries, 3);
  cache.exit_scope(inner);
  EXPECT_EQ(changes().entries, 2);
  cache.exit_scope(outer);
  EXPECT_EQ(changes().entries, 1);
  EXPECT_TRUE(cuseq::packed_cu_seqlens(outside).is_same(kept));
  cache.invalidate(outside);
  EXPECT_EQ(changes().entries, 0);
  cuseq::packed_cu_seqlens(outside);
  cache.clear();
  const cuseq::CacheStats end = changes();
  EXPECT_EQ(end.entries, 0);
  EXPECT_EQ(end.bytes, 0);
  EXPECT_EQ(end.evictions, 0) << "none of these was for room";
}

TEST_F(Cache, InferenceMode) {
  const at::Tensor lengths = ints({2, 3});
  {
    const c10::InferenceMode guard;
    cuseq::packed_cu_seqlens(lengths);
    cuseq::packed_cu_seqlens(ints({2, 3}));  // an inference tensor as the key
  }
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.entries, 0);
  EXPECT_EQ(change.misses, 1);
  EXPECT_EQ(change.bypasses, 1);
  const at::Tensor value = cuseq::packed_cu_seqlens(lengths);
  EXPECT_FALSE(value.is_inference());
  const c10::InferenceMode guard;
  EXPECT_TRUE(cuseq::packed_cu_seqlens(lengths).is_same(value));
}

TEST_F(Cache, IsBoundedInNumber) {
  std::vector<at::Tensor> keys;
  for (int64_t i = 0; i < 100; ++i) keys.push_back(ints({i, 1}));
  for (const at::Tensor& key : keys) cuseq::packed_cu_seqlens(key);
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.entries, 64);
  EXPECT_EQ(change.evictions, 36);
}

TEST_F(Cache, ThreadsShareIt) {
  std::vector<at::Tensor> shared;
  for (int64_t i = 0; i < 8; ++i) shared.push_back(ints({i, 1}));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      for (int64_t step = 0; step < 2000; ++step) {
        const int64_t i = (seed + step) % 8;
        const at::Tensor own = ints({step, seed});
        wrong += values_of(cuseq::packed_cu_seqlens(shared[i])) != Values{0, i, i + 1};
        wrong += values_of(cuseq::packed_cu_seqlens(own)) != Values{0, step, step + seed};
        if (step % 64 == 0) IdentityCache::instance().clear();
        if (step % 17 == 0) IdentityCache::instance().invalidate(shared[i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(changes().entries, 8);
}

}  // namespace
