// Tests of cuseq/cache.h as a program without Python uses it. Also built and run under
// ThreadSanitizer: see scripts/run_thread_sanitizer.sh.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "tensors.h"

namespace {

using cuseq::CachedOp;
using cuseq::CacheQuery;
using cuseq::IdentityCache;
using cuseq_tests::ints;
using cuseq_tests::Values;
using cuseq_tests::values_of;

class Cache : public testing::Test {
 protected:
  void SetUp() override {
    IdentityCache::instance().clear();
    before_ = IdentityCache::instance().stats();
  }
  void TearDown() override { IdentityCache::instance().clear(); }

  // Changes since the test began or since the last call.
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

TEST_F(Cache, OffsetsWithRoomEndWithEmptySequences) {
  const at::Tensor offsets = ints({0, 2, 5, 9});
  const at::Tensor all = cuseq::cached_offsets_with_room(offsets, 0, 3, 6);
  EXPECT_EQ(values_of(all), (Values{0, 2, 5, 9, 9, 9, 9}));
  EXPECT_TRUE(cuseq::cached_offsets_with_room(offsets, 0, 3, 6).is_same(all));
  EXPECT_EQ(values_of(cuseq::cached_offsets_with_room(offsets, 1, 1, 2)), (Values{2, 5, 5}));
  EXPECT_EQ(values_of(cuseq::cached_offsets_with_room(offsets, 0, 3, 3)), (Values{0, 2, 5, 9}));
  offsets.add_(0);
  EXPECT_FALSE(cuseq::cached_offsets_with_room(offsets, 0, 3, 6).is_same(all));
}

TEST_F(Cache, AHitIsTheSameTensor) {
  const at::Tensor lengths = ints({2, 3});
  const at::Tensor offsets = cuseq::cached_cu_seqlens(lengths);
  const at::Tensor positions = cuseq::cached_position_ids(lengths, 6);
  const at::Tensor longer = cuseq::cached_position_ids(lengths, 7);
  const at::Tensor segments = cuseq::cached_seq_ids(lengths, 6);
  EXPECT_TRUE(cuseq::cached_cu_seqlens(lengths).is_same(offsets));
  EXPECT_TRUE(cuseq::cached_position_ids(lengths, 6).is_same(positions));
  EXPECT_TRUE(cuseq::cached_position_ids(lengths, 7).is_same(longer));
  EXPECT_TRUE(cuseq::cached_seq_ids(lengths, 6).is_same(segments));
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
  cuseq::cached_cu_seqlens(lengths);
  lengths.fill_(1);
  at::Tensor value = cuseq::cached_cu_seqlens(lengths);
  EXPECT_EQ(values_of(value), (Values{0, 1, 2}));
  value.fill_(9);
  EXPECT_EQ(values_of(cuseq::cached_cu_seqlens(lengths)), (Values{0, 1, 2}));
  lengths.set_data(ints({4, 5}));
  EXPECT_EQ(values_of(cuseq::cached_cu_seqlens(lengths)), (Values{0, 4, 9}));
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.hits, 0);
  EXPECT_EQ(change.misses, 4);
  EXPECT_EQ(change.entries, 1);
}

TEST_F(Cache, NothingIsPinned) {
  at::Tensor lengths = ints({2, 3});
  at::Tensor value = cuseq::cached_cu_seqlens(lengths);
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(value.getIntrusivePtr());
  value.reset();
  EXPECT_FALSE(watched.expired());
  lengths.reset();
  // Without a Python wrapper, the key's death is noticed only at the next call.
  EXPECT_EQ(changes().entries, 0);
  EXPECT_TRUE(watched.expired());
}

TEST_F(Cache, ADeadKeyGoesWithTheNextCall) {
  at::Tensor lengths = ints({2, 3});
  at::Tensor value = cuseq::cached_cu_seqlens(lengths);
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(value.getIntrusivePtr());
  value.reset();
  const at::Tensor other = ints({1});
  cuseq::cached_cu_seqlens(other);
  lengths.reset();
  EXPECT_FALSE(watched.expired()) << "without a Python wrapper no callback reports the death";
  cuseq::cached_cu_seqlens(other);
  EXPECT_EQ(changes().hits, 1);
  EXPECT_TRUE(watched.expired());
}

TEST_F(Cache, ScopesInvalidateAndClear) {
  IdentityCache& cache = IdentityCache::instance();
  const at::Tensor outside = ints({2, 3});
  const at::Tensor inside = ints({2, 3});
  const at::Tensor kept = cuseq::cached_cu_seqlens(outside);
  const uint64_t outer = cache.enter_scope();
  cuseq::cached_cu_seqlens(inside);
  const uint64_t inner = cache.enter_scope();
  cuseq::cached_seq_ids(inside, 6);
  EXPECT_EQ(changes().entries, 3);
  cache.exit_scope(inner);
  EXPECT_EQ(changes().entries, 2);
  cache.exit_scope(outer);
  EXPECT_EQ(changes().entries, 1);
  EXPECT_TRUE(cuseq::cached_cu_seqlens(outside).is_same(kept));
  cache.invalidate(outside);
  EXPECT_EQ(changes().entries, 0);
  cuseq::cached_cu_seqlens(outside);
  cache.clear();
  const cuseq::CacheStats end = changes();
  EXPECT_EQ(end.entries, 0);
  EXPECT_EQ(end.bytes, 0);
  EXPECT_EQ(end.evictions, 0) << "none of these was for room";
}

TEST_F(Cache, InvalidateReachesAllViewsOfTheMemory) {
  IdentityCache& cache = IdentityCache::instance();
  const at::Tensor buffer = ints({2, 3, 4, 5});
  const at::Tensor lengths = buffer.narrow(0, 0, 2);
  const at::Tensor other = ints({2, 3});
  const at::Tensor offsets = cuseq::cached_cu_seqlens(lengths);
  const at::Tensor kept = cuseq::cached_cu_seqlens(other);
  cache.invalidate(buffer);
  EXPECT_FALSE(cuseq::cached_cu_seqlens(lengths).is_same(offsets));
  // invalidated through a view of a cached value
  cache.invalidate(cuseq::cached_cu_seqlens(lengths).view({1, -1}));
  EXPECT_EQ(changes().entries, 1);
  EXPECT_TRUE(cuseq::cached_cu_seqlens(other).is_same(kept));
}

TEST_F(Cache, ObjectsAreKeptByTheirFact) {
  IdentityCache& cache = IdentityCache::instance();
  const at::Tensor key = ints({2, 3});
  auto object = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = object;
  CacheQuery query{key, CachedOp::kObject, key.device()};
  query.parameters.fact = 5;
  const at::Tensor half = at::zeros({10}, at::kFloat).narrow(0, 0, 5);
  cache.insert(query, cuseq::identities_of(query),
               std::make_shared<const cuseq::CachedValue>(
                   cuseq::CachedValue{{half, half.view({5, 1})}, std::move(object)}));
  EXPECT_EQ(cache.find(query)->object.get(), watched.lock().get());
  const auto holdings = cache.holdings();
  ASSERT_EQ(holdings.size(), 1);
  EXPECT_EQ(holdings[0].op, CachedOp::kObject);
  EXPECT_EQ(holdings[0].fact, 5);
  EXPECT_EQ(holdings[0].entries, 1);
  EXPECT_EQ(holdings[0].bytes, 40) << "memory that two tensors share counts once";
  query.parameters.fact = 6;
  EXPECT_EQ(cache.find(query), nullptr);
  query.parameters.fact = 5;
  half.fill_(1);
  EXPECT_EQ(cache.find(query), nullptr) << "a tensor of the value was edited";
  EXPECT_TRUE(watched.expired());
}

TEST_F(Cache, InferenceMode) {
  const at::Tensor lengths = ints({2, 3});
  {
    const c10::InferenceMode guard;
    cuseq::cached_cu_seqlens(lengths);
    cuseq::cached_cu_seqlens(ints({2, 3}));  // an inference tensor as the key
  }
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.entries, 0);
  EXPECT_EQ(change.misses, 1);
  EXPECT_EQ(change.bypasses, 1);
  const at::Tensor value = cuseq::cached_cu_seqlens(lengths);
  EXPECT_FALSE(value.is_inference());
  const c10::InferenceMode guard;
  EXPECT_TRUE(cuseq::cached_cu_seqlens(lengths).is_same(value));
}

TEST_F(Cache, IsBoundedInNumber) {
  std::vector<at::Tensor> keys;
  for (int64_t i = 0; i < 100; ++i) keys.push_back(ints({i, 1}));
  for (const at::Tensor& key : keys) cuseq::cached_cu_seqlens(key);
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.entries, 64);
  EXPECT_EQ(change.evictions, 36);
}

// A tensor whose destruction calls the cache, as a tensor with a Python wrapper may run any code.
// If it were destroyed under a mutex of the cache, that call would deadlock.
at::Tensor calls_the_cache_when_destroyed(std::atomic<int>& destroyed) {
  static int32_t numbers[2] = {0, 1};
  return at::from_blob(
      numbers, {2},
      [&destroyed](void*) {
        IdentityCache::instance().stats();
        ++destroyed;
      },
      at::kInt);
}

// Runs the body on a thread of its own, so that a deadlock ends the program instead of hanging it.
void expect_return(const std::function<void()>& body) {
  std::packaged_task<void()> task(body);
  std::future<void> done = task.get_future();
  std::thread thread(std::move(task));
  if (done.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
    std::fprintf(stderr, "deadlock in the cache\n");
    std::abort();
  }
  thread.join();
  done.get();
}

TEST_F(Cache, NothingIsDestroyedUnderAMutex) {
  IdentityCache& cache = IdentityCache::instance();
  std::atomic<int> destroyed = 0;
  at::Tensor key = ints({1});
  const auto keep = [&](const at::Tensor& of, int64_t parameter) {
    const CacheQuery query{of, CachedOp::kCuSeqlens, of.device(), {parameter}};
    cache.insert(query, cuseq::identities_of(query),
                 std::make_shared<const cuseq::CachedValue>(
                     cuseq::CachedValue{{calls_the_cache_when_destroyed(destroyed)}, nullptr}));
  };
  const std::vector<std::pair<const char*, std::function<void()>>> ends = {
      {"clear", [&] { cache.clear(); }},
      {"drop_key", [&] { cache.drop_key(key.unsafeGetTensorImpl()); }},
      {"invalidate", [&] { cache.invalidate(key); }},
      {"inserted again", [&] { keep(key, 0); }},
      {"found stale",
       [&] {
         key.fill_(3);
         cache.find({key, CachedOp::kCuSeqlens, key.device()});
       }},
      {"key died", [&] {
         key = ints({1});
         cache.stats();
       }}};
  for (const auto& [name, end] : ends) {
    SCOPED_TRACE(name);
    destroyed = 0;
    keep(key, 0);
    expect_return(end);
    EXPECT_EQ(destroyed, 1);
    cache.clear();
  }
  destroyed = 0;
  expect_return([&] {
    const uint64_t scope = cache.enter_scope();
    keep(key, 0);
    cache.exit_scope(scope);
  });
  EXPECT_EQ(destroyed, 1) << "the end of a scope";
  destroyed = 0;
  expect_return([&] {
    for (int64_t i = 0; i < 65; ++i) keep(key, i);
  });
  EXPECT_EQ(destroyed, 1) << "evicted for room";
  cache.clear();  // while `destroyed` exists
}

TEST_F(Cache, TheWatcherIsCalledWithoutLocks) {
  static std::atomic<int> watched;
  static std::atomic<int> unwatched;
  watched = unwatched = 0;
  IdentityCache& cache = IdentityCache::instance();
  cache.set_watcher({[](const at::Tensor& key) {
                       ++watched;
                       IdentityCache::instance().drop_key(key.unsafeGetTensorImpl());
                     },
                     [](const c10::TensorImpl* key) {
                       ++unwatched;
                       IdentityCache::instance().drop_key(key);
                     }});
  const at::Tensor key = ints({2, 3});
  expect_return([&] { cuseq::cached_cu_seqlens(key); });
  expect_return([&] { cache.invalidate(key); });
  cache.set_watcher({nullptr, nullptr});
  EXPECT_EQ(watched, 1);
  EXPECT_EQ(unwatched, 1);
}

constexpr int kThreads = 8;

void on_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Cache, ThreadsInsertHitClearInvalidateAndDrop) {
  // Other threads may replace the tensor in a slot, so keys are destroyed on any thread.
  struct Slot {
    std::mutex mutex;
    at::Tensor key;
    int64_t first = 0;
  };
  std::array<Slot, 12> slots;
  std::atomic<int> wrong = 0;
  expect_return([&] {
    on_threads([&](int seed) {
      IdentityCache& cache = IdentityCache::instance();
      std::mt19937 random(seed);
      for (int64_t step = 0; step < 3000; ++step) {
        Slot& slot = slots[random() % slots.size()];
        at::Tensor key;
        int64_t first = 0;
        {
          const std::lock_guard<std::mutex> lock(slot.mutex);
          if (!slot.key.defined() || random() % 8 == 0) {
            slot.first = static_cast<int64_t>(random() % 5);
            slot.key = ints({slot.first, 1});
          }
          key = slot.key;
          first = slot.first;
        }
        const uint64_t scope = random() % 4 == 0 ? cache.enter_scope() : 0;
        wrong += values_of(cuseq::cached_cu_seqlens(key)) != Values{0, first, first + 1};
        wrong += cuseq::cached_position_ids(key, 6).size(0) != 6;
        if (scope != 0) cache.exit_scope(scope);
        switch (random() % 64) {
          case 0:
            cache.clear();
            break;
          case 1:
          case 2:
            cache.invalidate(key);
            break;
          case 3:
            cache.stats();
            break;
          default:
            break;
        }
      }
    });
  });
  EXPECT_EQ(wrong, 0);
  const cuseq::CacheStats change = changes();
  EXPECT_EQ(change.hits + change.misses, kThreads * 3000 * 2);
  EXPECT_GT(change.hits, 0);
  EXPECT_LE(change.entries, static_cast<int64_t>(2 * slots.size()));
}

TEST_F(Cache, ThreadsBeyondItsSize) {
  expect_return([] {
    on_threads([](int seed) {
      std::vector<at::Tensor> keys;
      // More keys than the cache holds, so that a thread running alone evicts entries too.
      for (int64_t i = 0; i < 80; ++i) keys.push_back(ints({seed, i}));
      for (int round = 0; round < 20; ++round) {
        for (const at::Tensor& key : keys) cuseq::cached_cu_seqlens(key);
      }
    });
  });
  const cuseq::CacheStats change = changes();
  EXPECT_GT(change.evictions, 0);
  EXPECT_EQ(change.entries, 0) << "all keys are gone";
  EXPECT_EQ(change.bytes, 0);
}

}  // namespace
