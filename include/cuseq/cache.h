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

// What is computed from a key tensor. csrc/cache/cached_ops.cpp has one row for each.
enum class CachedOp : uint8_t {
  kCuSeqlens,
  kHostCopy,
  kPositionIds,
  kSeqIds,
  kSegmentRows,
  kMaskRanges,
  kDenseMask,
  kBlockMask,
  kObject,  // made by the caller; CacheParameters::fact says what it is
};
constexpr size_t kCachedOps = static_cast<size_t>(CachedOp::kObject) + 1;
CUSEQ_API const char* name_of(CachedOp op);

// What else decides a value, normalised by the caller: equal calls, equal parameters.
struct CacheParameters {
  int64_t total_tokens = 0;
  int64_t row_length = 0;
  int64_t window = 0;
  int64_t fact = 0;  // the caller's number for the kind of an object and its parameters
  std::array<int64_t, 2> block_size{};
  at::ScalarType dtype = at::kInt;
  bool from_cu_seqlens = false;
  bool causal = false;
  bool finite = false;

  bool operator==(const CacheParameters&) const = default;
};

struct CacheQuery {
  const at::Tensor& key;
  CachedOp op;
  c10::Device device;  // where the value lies
  CacheParameters parameters{};
  // Other tensors that it is computed from, by their identity as the key; null where there is none.
  std::array<const at::Tensor*, 2> others{};
};

// A value, whole: what is kept and dropped together.
struct CachedValue {
  // Counted in bytes; an edit of one of them ends the entry.
  c10::SmallVector<at::Tensor, 1> tensors;
  std::shared_ptr<void> object;  // a binding's object made of them, such as a BlockMask
};
using CachedValuePtr = std::shared_ptr<const CachedValue>;

// Which tensor it was and what was in it: a held weak reference to its TensorImpl, whose address
// therefore cannot be recycled, with version counter, storage, offset, sizes, strides and dtype.
class CUSEQ_API TensorIdentity {
 public:
  explicit TensorIdentity(const at::Tensor& tensor);

  bool is(const c10::TensorImpl* tensor) const { return address_ == tensor; }
  bool expired() const { return impl_.expired(); }
  bool lies_in(const c10::StorageImpl* storage) const { return storage_address_ == storage; }
  // Of the tensor that `is` this one: it may have been edited or rebound since.
  bool unchanged(const at::Tensor& now) const;

 private:
  // Weak references keep the addresses from being recycled, not the data alive.
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

// The tensors of a query as they were before its value was computed.
struct Identities {
  TensorIdentity key;
  std::array<std::optional<TensorIdentity>, 2> others;
};
CUSEQ_API Identities identities_of(const CacheQuery& query);

// Whether a tensor is plain data with a version counter, such as keys and values have to be.
CUSEQ_API bool has_identity(const at::Tensor& tensor);

struct CacheStats {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t bypasses = 0;   // calls that may not touch the cache: traced, watched, captured
  int64_t evictions = 0;  // entries dropped for room, not because their key went
  int64_t bytes = 0;      // of the values held now
  int64_t entries = 0;    // held now
};

// What is held of one kind.
struct CacheHolding {
  CachedOp op;
  int64_t fact;
  int64_t entries;
  int64_t bytes;
};

// Facts about a tensor, kept for as long as the tensor lives and is not changed.
//
// A key is the identity of a tensor, not its values. Nothing is pinned: entries of a dead key go
// when it dies (see watch), or at the next call where nobody watches.
//
// One process-wide cache, since checkpoint recompute runs on autograd's threads. All entries of a
// key lie in one shard, so that threads with keys of their own do not queue for one mutex. Under a
// shard's mutex nothing is allocated on a device, no Python runs, no tensor is destroyed and no
// other mutex is taken: entries are spliced into a list that is destroyed after unlocking.
class CUSEQ_API IdentityCache {
 public:
  static IdentityCache& instance();

  // Whether a call may touch the cache: it is not traced, watched or captured, and its tensors are
  // plain data with version counters.
  bool usable_for(const CacheQuery& query) const;

  // The value if it is held and still right, waited for by the current stream where another one
  // made it.
  CachedValuePtr find(const CacheQuery& query);

  // The same for callers who hold a lock of their own, such as the GIL: it calls no device. Without
  // a hit, or where a stream would have to wait, it returns and counts nothing.
  CachedValuePtr find_at_once(const CacheQuery& query);

  // A value that alone is above the limit in bytes is not kept. What outlives scopes goes with its
  // key alone.
  void insert(const CacheQuery& query, Identities identities, CachedValuePtr value,
              bool outlives_scopes = false);

  // Drops what has to go before a value of so many bytes is allocated: masks, then facts about
  // tokens, offsets last; among those what is old and large, by its age times its bytes. Nothing,
  // where the value alone is above the limit. Where entries are too many the oldest goes.
  void make_room_for(int64_t bytes);

  void count_bypass() { bypasses_.fetch_add(1, std::memory_order_relaxed); }

  // Drops every entry that the memory of a tensor has a part in, as the key, as another input or in
  // the value, through any view; and the references to the tensor itself.
  void invalidate(const at::Tensor& tensor);
  // Drops what was computed from a tensor that is being destroyed.
  void drop_key(const c10::TensorImpl* key);

  void clear();

  // Entries that this thread inserts between the two go at the second; scopes nest.
  uint64_t enter_scope();
  void exit_scope(uint64_t scope);

  CacheStats stats();
  std::vector<CacheHolding> holdings();

  // Called, without locks, for a key's first entry, for other tensors at every one, and when one is
  // invalidated. The Python module attaches a weak-reference callback here, so that a key's death
  // is noticed at once. Set before the first insertion.
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
    CachedValuePtr value;
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

// The value from the cache, computed and kept on a miss. Computed only, where the cache may not be
// touched. Not for kObject, which the caller makes.
CUSEQ_API CachedValuePtr packed(const CacheQuery& query);

// What the cached ops ask for. The options must outlive the query.
CUSEQ_API CacheQuery mask_ranges_query(const MaskOptions& options);
CUSEQ_API CacheQuery dense_mask_query(const MaskOptions& options, std::optional<int64_t> row_length,
                                      std::optional<at::ScalarType> dtype, bool finite);
CUSEQ_API CacheQuery block_mask_query(const MaskOptions& options, std::optional<int64_t> row_length,
                                      int64_t query_block, int64_t key_block);

// Places and ranks of the real tokens of a row whose segments have padding
// (torch.ops.cuseq.segment_rows).
CUSEQ_API std::tuple<at::Tensor, at::Tensor> cached_segment_rows(
    const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_padded, int64_t total_tokens);

// Small tensors of a device, such as offsets and spans, on the host for as long as they live:
// copied, which waits, unless somebody who has them there said so.
CUSEQ_API at::Tensor cached_on_host(const at::Tensor& on_device);
CUSEQ_API std::optional<at::Tensor> remembered_on_host(const at::Tensor& on_device);
CUSEQ_API void remember_on_host(const at::Tensor& on_device, const at::Tensor& on_host);

}  // namespace cuseq
