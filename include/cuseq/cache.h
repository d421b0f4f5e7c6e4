#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuseq/macros.h"

namespace cuseq {

// What is computed from a key tensor.
enum class CachedOp : uint8_t { kCuSeqlens, kPositionIds, kSeqIds };

struct CacheQuery {
  const at::Tensor& key;
  CachedOp op;
  c10::Device device;     // where the value lies
  int64_t parameter = 0;  // normalised by the caller: equal calls, equal numbers
};

struct CacheStats {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t bypasses = 0;   // calls that may not touch the cache: traced, watched, captured
  int64_t evictions = 0;  // entries dropped for room, not because their key went
  int64_t bytes = 0;      // of the values held now
  int64_t entries = 0;    // held now
};

// Facts about a pack, kept for as long as the tensor of its lengths lives and is not changed.
//
// A key is the identity of a tensor, not its values: a held weak reference to its TensorImpl, whose
// address therefore cannot be recycled, with version counter, storage, offset, sizes, strides and
// dtype. Nothing is pinned: entries of a dead key go when it dies (see watch), or at the next call
// where nobody watches.
//
// One process-wide cache, since checkpoint recompute runs on autograd's threads. All entries of a
// key lie in one shard, so that threads with keys of their own do not queue for one mutex. Under a
// shard's mutex nothing is allocated on a device, no Python runs, no tensor is destroyed and no
// other mutex is taken: entries are spliced into a list that is destroyed after unlocking.
class CUSEQ_API IdentityCache {
 public:
  static IdentityCache& instance();

  // Whether a call with this key may touch the cache: it is not traced, watched or captured, and
  // the key is plain data with a version counter.
  bool usable_for(const at::Tensor& key) const;

  // The value if it is held and still right, waited for by the current stream where another one
  // made it.
  std::optional<at::Tensor> find(const CacheQuery& query);

  // The same for callers who hold a lock of their own, such as the GIL: it calls no device. Without
  // a hit, or where a stream would have to wait, it returns and counts nothing.
  std::optional<at::Tensor> find_at_once(const CacheQuery& query);

  // `version` is the key's version counter from before the value was computed. A value that alone
  // is above the limit in bytes is not kept.
  void insert(const CacheQuery& query, int64_t version, const at::Tensor& value);

  void count_bypass() { bypasses_.fetch_add(1, std::memory_order_relaxed); }

  // Drops the entries of one key, and what is watching it, so that nothing refers to it any more.
  void invalidate(const at::Tensor& key);
  // The same for a key that is being destroyed.
  void drop_key(const c10::TensorImpl* key);

  void clear();

  // Entries that this thread inserts between the two go at the second; scopes nest.
  uint64_t enter_scope();
  void exit_scope(uint64_t scope);

  CacheStats stats();

  // Called, without locks, for a key's first entry and when a key is invalidated. The Python module
  // attaches a weak-reference callback here, so that a key's death is noticed at once. Set before
  // the first insertion.
  struct Watcher {
    void (*watch)(const at::Tensor& key);
    void (*unwatch)(const c10::TensorImpl* key);
  };
  void set_watcher(Watcher watcher) { watcher_ = watcher; }

 private:
  struct Entry;
  using Entries = std::list<Entry>;
  using Condition = std::function<bool(const Entry&)>;

  // A cache line of its own, or threads on neighbouring shards would slow each other.
  struct alignas(64) Shard {
    std::mutex mutex;
    Entries entries;
    int64_t hits = 0;
    int64_t misses = 0;
    // As many as `entries`, written under the mutex; read without it, to pass over empty shards.
    std::atomic<size_t> size = 0;
  };
  static constexpr size_t kShards = 64;

  struct Hit {
    at::Tensor value;
    std::shared_ptr<c10::Event> made_elsewhere;  // to be waited for, unless null
  };
  enum class Count : uint8_t { kAlways, kHitsAtOnce };

  IdentityCache();

  // A child of fork() has one thread: what the others had locked would stay locked for ever.
  void lock_all();
  void unlock_all();

  Hit look_up(const CacheQuery& query, const std::optional<c10::Stream>& current, Count count);
  Shard& shard_of(const c10::TensorImpl* key);
  void move_out(Shard& shard, Entries::iterator entry, Entries& dead);
  void move_out_if(Shard& shard, const Condition& condition, Entries& dead);
  void move_out_if(const Condition& condition, Entries& dead);
  void move_out_expired(Entries& dead);
  void make_room(Entries& dead);

  bool enabled_;
  int64_t max_entries_;
  int64_t max_bytes_;
  Watcher watcher_{nullptr, nullptr};

  std::array<Shard, kShards> shards_;
  std::atomic<uint64_t> clock_ = 0;
  std::atomic<int64_t> entries_ = 0;
  std::atomic<int64_t> bytes_ = 0;
  std::atomic<int64_t> bypasses_ = 0;
  std::atomic<int64_t> evictions_ = 0;
};

// The value from the cache, computed and kept on a miss. Computed only, where the cache may not be
// touched.
CUSEQ_API at::Tensor packed(const CacheQuery& query);

}  // namespace cuseq
