#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/SmallVector.h>

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
#include "cuseq/ops.h"

namespace cuseq {

// Kinds of cached values. Each has one row in csrc/cache/cached_ops.cpp.
enum class CachedOp : uint8_t {
  kCuSeqlens,
  kHostCopy,
  kOffsetsWithRoom,
  kPositionIds,
  kSeqIds,
  kSegmentRows,
  kMaskRanges,
  kDenseMask,
  kBlockMask,
  kObject,  // made by the caller; CacheParameters::fact identifies the kind
};
constexpr size_t kCachedOps = static_cast<size_t>(CachedOp::kObject) + 1;
CUSEQ_API const char* name_of(CachedOp op);

// The other inputs that determine a value. Callers normalise them, so that equal calls have equal
// parameters.
struct CacheParameters {
  int64_t total_tokens = 0;
  int64_t row_length = 0;
  int64_t window = 0;
  int64_t fact = 0;  // caller-defined number for an object's kind and parameters
  std::array<int64_t, 2> block_size{};
  std::array<int64_t, 3> sequences{};  // the first, their number, and how many there is room for
  at::ScalarType dtype = at::kInt;
  bool from_cu_seqlens = false;
  bool causal = false;
  bool finite = false;

  bool operator==(const CacheParameters&) const = default;
};

struct CacheQuery {
  const at::Tensor& key;
  CachedOp op;
  c10::Device device;  // device of the value
  CacheParameters parameters{};
  // Other input tensors, matched by identity like the key; null where unused.
  std::array<const at::Tensor*, 2> others{};
};

// A cached value. Its parts are kept and dropped together.
struct CachedValue {
  // Count towards the byte limit. An in-place edit of any of them invalidates the entry.
  c10::SmallVector<at::Tensor, 1> tensors;
  std::shared_ptr<void> object;  // made by a binding, such as a BlockMask
};
using CachedValuePtr = std::shared_ptr<const CachedValue>;

// The identity of a tensor and of its contents: a weak reference to its TensorImpl, plus version
// counter, storage, offset, sizes, strides and dtype. The weak reference keeps the address of the
// TensorImpl from being recycled.
class CUSEQ_API TensorIdentity {
 public:
  explicit TensorIdentity(const at::Tensor& tensor);

  bool is(const c10::TensorImpl* tensor) const { return address_ == tensor; }
  bool expired() const { return impl_.expired(); }
  bool lies_in(const c10::StorageImpl* storage) const { return storage_address_ == storage; }
  // Return whether the tensor still has the recorded contents. Requires is(now); the tensor may
  // have been edited or rebound since.
  bool unchanged(const at::Tensor& now) const;

 private:
  // Weak references keep the addresses from being recycled, but do not keep the data alive.
  c10::weak_intrusive_ptr<c10::TensorImpl> impl_;
  const c10::TensorImpl* address_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const c10::StorageImpl* storage_address_;
  int64_t version_;
  int64_t storage_offset_;
  c10::ScalarType dtype_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

// The identities of a query's tensors, taken before its value is computed.
struct Identities {
  TensorIdentity key;
  std::array<std::optional<TensorIdentity>, 2> others;
};
CUSEQ_API Identities identities_of(const CacheQuery& query);

// Return whether a tensor is plain data with a version counter, as keys and values must be.
CUSEQ_API bool has_identity(const at::Tensor& tensor);

struct CacheStats {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t bypasses = 0;   // calls that must skip the cache: traced, under a dispatch mode, captured
  int64_t evictions = 0;  // entries dropped to make room, not because their key died
  int64_t bytes = 0;      // bytes of the current values
  int64_t entries = 0;    // current entries
};

// Current entries of one kind.
struct CacheHolding {
  CachedOp op;
  int64_t fact;
  int64_t entries;
  int64_t bytes;
};

// A cache of values computed from a tensor. A value stays for as long as the tensor lives
// unchanged.
//
// The key is the identity of a tensor, not its values. The cache keeps no key alive: entries of a
// dead key are dropped when it dies if there is a Watcher, otherwise at the next call.
//
// There is one cache per process, because checkpoint recompute runs on autograd's threads. All
// entries of a key are in one shard, so that threads with different keys do not contend for one
// mutex. While a shard's mutex is held, no device memory is allocated, no Python runs, no tensor is
// destroyed and no other mutex is taken: dropped entries are spliced into a list that is destroyed
// after unlocking.
class CUSEQ_API IdentityCache {
 public:
  static IdentityCache& instance();

  // Return whether a call may use the cache: it must not be traced, under a dispatch mode or
  // captured, and its tensors must be plain data with version counters.
  bool usable_for(const CacheQuery& query) const;

  // Return the value if it is cached and still valid, else null. If another stream made the value,
  // the current stream waits for it.
  CachedValuePtr find(const CacheQuery& query);

  // Like find, but makes no device call, for callers that hold a lock such as the GIL. On a miss,
  // or if a stream would have to wait, return null and count nothing.
  CachedValuePtr find_at_once(const CacheQuery& query);

  // Insert a value, unless it alone exceeds the byte limit. With outlives_scopes, closing a scope
  // does not drop the entry.
  void insert(const CacheQuery& query, Identities identities, CachedValuePtr value,
              bool outlives_scopes = false);

  // Evict entries so that a value of this many bytes can be allocated. Masks and objects go first,
  // then values per token, offsets last; within each group, the largest product of age and bytes
  // goes first. If there are too many entries, the least recently used goes. Do nothing if the
  // value alone exceeds the limit.
  void make_room_for(int64_t bytes);

  void count_bypass() { bypasses_.fetch_add(1, std::memory_order_relaxed); }

  // Drop every entry whose key, other input or value shares memory with the tensor, through any
  // view. Also stop watching the tensor.
  void invalidate(const at::Tensor& tensor);
  // Drop the entries computed from a tensor that is being destroyed.
  void drop_key(const c10::TensorImpl* key);

  void clear();

  // Open and close a scope. Entries that this thread inserts within a scope are dropped when it
  // closes; scopes nest.
  uint64_t enter_scope();
  void exit_scope(uint64_t scope);

  CacheStats stats();
  std::vector<CacheHolding> holdings();

  // Functions called without locks held: watch for a key's first entry and for the other tensors of
  // every entry, unwatch when a tensor is invalidated. The Python module attaches a weak-reference
  // callback here, so that entries are dropped as soon as their key dies. Set before the first
  // insertion.
  struct Watcher {
    void (*watch)(const at::Tensor& key);
    void (*unwatch)(const c10::TensorImpl* key);
  };
  void set_watcher(Watcher watcher) { watcher_ = watcher; }

 private:
  struct Entry;
  using Entries = std::list<Entry>;
  using Condition = std::function<bool(const Entry&)>;

  // Aligned to a cache line to avoid false sharing between neighbouring shards.
  struct alignas(64) Shard {
    std::mutex mutex;
    Entries entries;
    int64_t hits = 0;
    int64_t misses = 0;
    // The size of `entries`. Written under the mutex; read without it to skip empty shards.
    std::atomic<size_t> size = 0;
  };
  static constexpr size_t kShards = 64;

  struct Hit {
    CachedValuePtr value;
    std::shared_ptr<c10::Event> made_elsewhere;  // null if made on the current stream
  };
  enum class Count : uint8_t { kAlways, kHitsAtOnce };

  IdentityCache();

  // A child of fork() has only the forking thread: a mutex held by another thread would stay locked
  // forever. So the forking thread holds all of them across the fork.
  void lock_all();
  void unlock_all();

  Hit look_up(const CacheQuery& query, const std::optional<c10::Stream>& current, Count count);
  Shard& shard_of(const c10::TensorImpl* key);
  void move_out(Shard& shard, Entries::iterator entry, Entries& dead);
  void move_out_if(Shard& shard, const Condition& condition, Entries& dead);
  void move_out_if(const Condition& condition, Entries& dead);
  void move_out_expired(Entries& dead);
  void make_room(int64_t more_bytes, std::optional<uint64_t> newest, Entries& dead);

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

// Return the value from the cache; on a miss, compute and insert it. If the cache may not be used,
// only compute it. Not for kObject, which the caller makes.
CUSEQ_API CachedValuePtr cached_value(const CacheQuery& query);

// Return the cache query of cached_mask_ranges, cached_dense_mask or cached_block_mask. The options
// must outlive the query.
CUSEQ_API CacheQuery mask_ranges_query(const MaskOptions& options);
CUSEQ_API CacheQuery dense_mask_query(const MaskOptions& options, std::optional<int64_t> row_length,
                                      std::optional<at::ScalarType> dtype, bool finite);
CUSEQ_API CacheQuery block_mask_query(const MaskOptions& options, std::optional<int64_t> row_length,
                                      int64_t query_block, int64_t key_block);

// Return the places and the ranks of the real tokens of a row with padded segments
// (torch.ops.cuseq.segment_rows), through the identity cache.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> cached_segment_rows(
    const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_padded, int64_t total_tokens);

// Return int32 [room + 1]: the offsets of `count` sequences of offsets int32 [n_seqs + 1], from
// sequence `first` on, and then empty sequences, through the identity cache.
CUSEQ_API at::Tensor cached_offsets_with_room(const at::Tensor& cu_seqlens, int64_t first,
                                              int64_t count, int64_t room);

// Host copies of small device tensors, such as offsets and spans, kept for as long as those live.
// cached_on_host copies, which synchronises, unless a copy is cached. remembered_on_host returns
// the cached copy or nullopt and never copies. remember_on_host caches a copy that the caller
// already has.
CUSEQ_API at::Tensor cached_on_host(const at::Tensor& on_device);
CUSEQ_API std::optional<at::Tensor> remembered_on_host(const at::Tensor& on_device);
CUSEQ_API void remember_on_host(const at::Tensor& on_device, const at::Tensor& on_host);

}  // namespace cuseq
