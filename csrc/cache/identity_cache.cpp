#include <ATen/CachedTensorUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "cache/cached_op.h"
#include "cuseq/cache.h"
#include "ops/checks.h"

namespace cuseq {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr DispatchKeySet kWatchingModes = DispatchKeySet(
    {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
     DispatchKey::PreDispatch, DispatchKey::Functionalize, DispatchKey::Tracer,
     DispatchKey::FuncTorchDynamicLayerFrontMode});

constexpr DispatchKeySet kNotPlainData = DispatchKeySet(
    {DispatchKey::Python, DispatchKey::Fake, DispatchKey::Functionalize,
     DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::ZeroTensor});

// Open scopes, innermost last. Entries made outside any scope have scope 0.
thread_local std::vector<uint64_t> open_scopes;

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Memory shared by several tensors counts once.
int64_t bytes_held_by(const c10::SmallVector<at::Tensor, 1>& tensors) {
  int64_t bytes = 0;
  for (auto tensor = tensors.begin(); tensor != tensors.end(); ++tensor) {
    const bool counted = std::any_of(tensors.begin(), tensor, [&](const at::Tensor& earlier) {
      return earlier.storage().is_alias_of(tensor->storage());
    });
    if (!counted) bytes += static_cast<int64_t>(tensor->storage().nbytes());
  }
  return bytes;
}

}  // namespace

bool has_identity(const at::Tensor& tensor) {
  return !tensor.key_set().has_any(kNotPlainData) && !tensor.is_meta() && tensor.has_storage() &&
         !tensor.is_inference() &&
         // Outputs of CUDA graph trees get new values at every replay with the same version.
         !at::caching::is_cached_tensor(tensor);
}

TensorIdentity::TensorIdentity(const at::Tensor& tensor)
    : impl_(tensor.getIntrusivePtr()),
      address_(tensor.unsafeGetTensorImpl()),
      storage_(tensor.storage().getWeakStorageImpl()),
      storage_address_(tensor.storage().unsafeGetStorageImpl()),
      version_(tensor._version()),
      storage_offset_(tensor.storage_offset()),
      dtype_(tensor.scalar_type()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()) {}

bool TensorIdentity::unchanged(const at::Tensor& now) const {
  return version_ == now._version() && storage_address_ == now.storage().unsafeGetStorageImpl() &&
         storage_offset_ == now.storage_offset() && dtype_ == now.scalar_type() &&
         now.sizes() == c10::IntArrayRef(sizes_) && now.strides() == c10::IntArrayRef(strides_);
}

Identities identities_of(const CacheQuery& query) {
  const auto identity_of = [](const at::Tensor* tensor) {
    return tensor == nullptr ? std::nullopt : std::optional<TensorIdentity>(*tensor);
  };
  return {TensorIdentity(query.key), {identity_of(query.others[0]), identity_of(query.others[1])}};
}

struct IdentityCache::Entry {
  Identities identities;
  CachedOp op;
  c10::Device device;
  CacheParameters parameters;

  CachedValuePtr value;
  c10::SmallVector<int64_t, 1> value_versions;
  int64_t bytes = 0;
  uint64_t scope;
  uint64_t last_use = 0;

  // Stream and event of the value's creation, for hits from other streams.
  std::optional<c10::Stream> stream;
  std::shared_ptr<c10::Event> made;

  Entry(const CacheQuery& query, Identities now, CachedValuePtr made_value, bool outlives_scopes)
      : identities(std::move(now)),
        op(query.op),
        device(query.device),
        parameters(query.parameters),
        value(std::move(made_value)),
        scope(outlives_scopes || open_scopes.empty() ? 0 : open_scopes.back()),
        stream(current_stream(query.device)) {
    for (const at::Tensor& tensor : value->tensors) value_versions.push_back(tensor._version());
    bytes = bytes_held_by(value->tensors);
    if (stream.has_value()) {
      made = std::make_shared<c10::Event>(stream->device_type());
      made->record(*stream);
    }
  }

  // Return whether is_true(identity, tensor) holds for the key and for every other tensor.
  template <typename F>
  bool true_of_all(const CacheQuery& query, const F& is_true) const {
    if (!is_true(identities.key, query.key)) return false;
    for (size_t i = 0; i < query.others.size(); ++i) {
      const auto& identity = identities.others[i];
      if (identity.has_value() != (query.others[i] != nullptr)) return false;
      if (identity.has_value() && !is_true(*identity, *query.others[i])) return false;
    }
    return true;
  }

  bool asked_by(const CacheQuery& query) const {
    return op == query.op && device == query.device && parameters == query.parameters &&
           true_of_all(query, [](const TensorIdentity& identity, const at::Tensor& tensor) {
             return identity.is(tensor.unsafeGetTensorImpl());
           });
  }

  // Return whether neither the query's tensors nor the cached value were edited since.
  bool still_right(const CacheQuery& query) const {
    for (size_t i = 0; i < value_versions.size(); ++i) {
      if (value_versions[i] != value->tensors[i]._version()) return false;
    }
    return true_of_all(query, [](const TensorIdentity& identity, const at::Tensor& tensor) {
      return identity.unchanged(tensor);
    });
  }

  bool refers_to(const c10::TensorImpl* tensor) const {
    return identities.key.is(tensor) ||
           std::ranges::any_of(identities.others, [tensor](const auto& identity) {
             return identity.has_value() && identity->is(tensor);
           });
  }

  bool expired() const {
    return identities.key.expired() ||
           std::ranges::any_of(identities.others, [](const auto& identity) {
             return identity.has_value() && identity->expired();
           });
  }

  bool lies_in(const c10::StorageImpl* storage) const {
    return identities.key.lies_in(storage) ||
           std::ranges::any_of(identities.others,
                               [storage](const auto& identity) {
                                 return identity.has_value() && identity->lies_in(storage);
                               }) ||
           std::ranges::any_of(value->tensors, [storage](const at::Tensor& tensor) {
             return tensor.storage().unsafeGetStorageImpl() == storage;
           });
  }
};

IdentityCache& IdentityCache::instance() {
  // Never destroyed: at exit, tensors may outlive the library's statics, and their destruction
  // would access the cache.
  static auto* cache = new IdentityCache();
  return *cache;
}

IdentityCache::IdentityCache()
    : enabled_(switch_from_environment("CUSEQ_CACHE", true)),
      max_entries_(limit_from_environment("CUSEQ_CACHE_MAX_ENTRIES", 64, /*least=*/1)),
      max_bytes_(limit_from_environment("CUSEQ_CACHE_MAX_BYTES")) {
  constexpr auto lock = [] { instance().lock_all(); };
  constexpr auto unlock = [] { instance().unlock_all(); };
  pthread_atfork(lock, unlock, unlock);
}

void IdentityCache::lock_all() {
  for (Shard& shard : shards_) shard.mutex.lock();
}

void IdentityCache::unlock_all() {
  for (Shard& shard : shards_) shard.mutex.unlock();
}

bool IdentityCache::usable_for(const CacheQuery& query) const {
  return enabled_ && !c10::impl::dispatch_mode_enabled() &&
         !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchingModes) &&
         has_identity(query.key) && !is_capturing(query.key.device()) && !query.device.is_meta() &&
         (query.device == query.key.device() || !is_capturing(query.device)) &&
         std::ranges::all_of(query.others, [](const at::Tensor* other) {
           return other == nullptr || has_identity(*other);
         });
}

IdentityCache::Shard& IdentityCache::shard_of(const c10::TensorImpl* key) {
  // The low bits of an address are constant because of alignment.
  return shards_[(reinterpret_cast<uintptr_t>(key) >> 6) % kShards];
}

void IdentityCache::move_out(Shard& shard, Entries::iterator entry, Entries& dead) {
  bytes_.fetch_sub(entry->bytes, std::memory_order_relaxed);
  entries_.fetch_sub(1, std::memory_order_relaxed);
  dead.splice(dead.end(), shard.entries, entry);
  shard.size.store(shard.entries.size(), std::memory_order_relaxed);
}

void IdentityCache::move_out_if(Shard& shard, const Condition& condition, Entries& dead) {
  const std::lock_guard<std::mutex> lock(shard.mutex);
  for (auto entry = shard.entries.begin(); entry != shard.entries.end();) {
    const auto current = entry++;
    if (condition(*current)) move_out(shard, current, dead);
  }
}

void IdentityCache::move_out_if(const Condition& condition, Entries& dead) {
  for (Shard& shard : shards_) {
    if (shard.size.load(std::memory_order_relaxed) > 0) move_out_if(shard, condition, dead);
  }
}

void IdentityCache::move_out_expired(Entries& dead) {
  move_out_if([](const Entry& entry) { return entry.expired(); }, dead);
}

void IdentityCache::make_room(int64_t more_bytes, std::optional<uint64_t> newest, Entries& dead) {
  while (true) {
    const bool short_of_bytes = bytes_.load(std::memory_order_relaxed) > max_bytes_ - more_bytes;
    if (!short_of_bytes && entries_.load(std::memory_order_relaxed) <= max_entries_) return;
    // The turn, then the benefit of dropping the entry; the largest pair is evicted.
    std::pair<int, double> best;
    Shard* shard_of_best = nullptr;
    uint64_t use_of_best = 0;
    const uint64_t now = clock_.load(std::memory_order_relaxed);
    for (Shard& shard : shards_) {
      if (shard.size.load(std::memory_order_relaxed) == 0) continue;
      const std::lock_guard<std::mutex> lock(shard.mutex);
      for (const Entry& entry : shard.entries) {
        if (entry.last_use == newest) continue;
        // Another thread may have used the entry since the clock was read.
        const auto age = static_cast<double>(now > entry.last_use ? now - entry.last_use : 0);
        const std::pair<int, double> worth =
            short_of_bytes ? std::pair{-static_cast<int>(row_of(entry.op).turn),
                                       age * static_cast<double>(entry.bytes + 1)}
                           : std::pair{0, age};
        if (shard_of_best != nullptr && worth <= best) continue;
        best = worth;
        shard_of_best = &shard;
        use_of_best = entry.last_use;
      }
    }
    if (shard_of_best == nullptr) return;
    const size_t dead_before = dead.size();
    // If the entry was used meanwhile, nothing matches and the loop picks another one.
    move_out_if(
        *shard_of_best, [use_of_best](const Entry& entry) { return entry.last_use == use_of_best; },
        dead);
    evictions_.fetch_add(static_cast<int64_t>(dead.size() - dead_before),
                         std::memory_order_relaxed);
  }
}

void IdentityCache::make_room_for(int64_t bytes) {
  if (bytes > max_bytes_) return;
  Entries dead;
  move_out_expired(dead);
  make_room(bytes, std::nullopt, dead);
}

IdentityCache::Hit IdentityCache::look_up(const CacheQuery& query,
                                          const std::optional<c10::Stream>& current, Count count) {
  Entries dead;
  Shard& shard = shard_of(query.key.unsafeGetTensorImpl());
  const std::lock_guard<std::mutex> lock(shard.mutex);
  const auto entry = std::ranges::find_if(
      shard.entries, [&](const Entry& candidate) { return candidate.asked_by(query); });
  const bool found = entry != shard.entries.end() && entry->still_right(query);
  if (count == Count::kHitsAtOnce && !(found && entry->stream == current)) return {};
  if (!found) {
    if (entry != shard.entries.end()) move_out(shard, entry, dead);
    ++shard.misses;
    return {};
  }
  entry->last_use = clock_.fetch_add(1, std::memory_order_relaxed);
  ++shard.hits;
  return {entry->value, entry->stream == current ? nullptr : entry->made};
}

CachedValuePtr IdentityCache::find_at_once(const CacheQuery& query) {
  return look_up(query, current_stream(query.device), Count::kHitsAtOnce).value;
}

CachedValuePtr IdentityCache::find(const CacheQuery& query) {
  if (watcher_.watch == nullptr) {
    Entries dead;
    move_out_expired(dead);
  }
  const std::optional<c10::Stream> current = current_stream(query.device);
  Hit hit = look_up(query, current, Count::kAlways);
  if (hit.value != nullptr && hit.made_elsewhere != nullptr) {
    hit.made_elsewhere->block(*current);
    for (const at::Tensor& tensor : hit.value->tensors) {
      if (tensor.device() == query.device) tensor.record_stream(*current);
    }
  }
  return std::move(hit.value);
}

void IdentityCache::insert(const CacheQuery& query, Identities identities, CachedValuePtr value,
                           bool outlives_scopes) {
  Entries dead;
  Entries fresh;
  Entry& entry =
      fresh.emplace_back(query, std::move(identities), std::move(value), outlives_scopes);
  if (entry.bytes > max_bytes_) return;
  move_out_expired(dead);
  bool first_of_key = true;
  uint64_t newest = 0;
  {
    const c10::TensorImpl* key = query.key.unsafeGetTensorImpl();
    Shard& shard = shard_of(key);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    for (auto other = shard.entries.begin(); other != shard.entries.end();) {
      const auto current = other++;
      if (!current->identities.key.is(key)) continue;
      first_of_key = false;
      // Another thread may have inserted the same value meanwhile.
      if (current->asked_by(query)) move_out(shard, current, dead);
    }
    newest = entry.last_use = clock_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(entry.bytes, std::memory_order_relaxed);
    entries_.fetch_add(1, std::memory_order_relaxed);
    shard.entries.splice(shard.entries.end(), fresh);
    shard.size.store(shard.entries.size(), std::memory_order_relaxed);
  }
  make_room(0, newest, dead);
  if (watcher_.watch == nullptr) return;
  if (first_of_key) watcher_.watch(query.key);
  for (const at::Tensor* other : query.others) {
    if (other != nullptr) watcher_.watch(*other);
  }
}

void IdentityCache::invalidate(const at::Tensor& tensor) {
  const c10::TensorImpl* address = tensor.unsafeGetTensorImpl();
  const c10::StorageImpl* storage =
      tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  Entries dead;
  move_out_if(
      [&](const Entry& entry) {
        return entry.refers_to(address) || (storage != nullptr && entry.lies_in(storage));
      },
      dead);
  if (watcher_.unwatch != nullptr) watcher_.unwatch(address);
}

void IdentityCache::drop_key(const c10::TensorImpl* key) {
  Entries dead;
  move_out_if([key](const Entry& entry) { return entry.refers_to(key); }, dead);
}

void IdentityCache::clear() {
  Entries dead;
  move_out_if([](const Entry&) { return true; }, dead);
}

uint64_t IdentityCache::enter_scope() {
  static std::atomic<uint64_t> next{1};
  open_scopes.push_back(next++);
  return open_scopes.back();
}

void IdentityCache::exit_scope(uint64_t scope) {
  std::erase(open_scopes, scope);
  Entries dead;
  move_out_if([scope](const Entry& entry) { return entry.scope == scope; }, dead);
}

CacheStats IdentityCache::stats() {
  Entries dead;
  move_out_expired(dead);
  CacheStats stats;
  for (Shard& shard : shards_) {
    const std::lock_guard<std::mutex> lock(shard.mutex);
    stats.hits += shard.hits;
    stats.misses += shard.misses;
    for (const Entry& entry : shard.entries) stats.bytes += entry.bytes;
    stats.entries += static_cast<int64_t>(shard.entries.size());
  }
  stats.bypasses = bypasses_.load(std::memory_order_relaxed);
  stats.evictions = evictions_.load(std::memory_order_relaxed);
  return stats;
}

std::vector<CacheHolding> IdentityCache::holdings() {
  Entries dead;
  move_out_expired(dead);
  std::vector<CacheHolding> holdings;
  for (Shard& shard : shards_) {
    const std::lock_guard<std::mutex> lock(shard.mutex);
    for (const Entry& entry : shard.entries) {
      const int64_t fact = entry.parameters.fact;
      auto holding = std::ranges::find_if(holdings, [&](const CacheHolding& known) {
        return known.op == entry.op && known.fact == fact;
      });
      if (holding == holdings.end()) {
        holding = holdings.insert(holdings.end(), {entry.op, fact, 0, 0});
      }
      ++holding->entries;
      holding->bytes += entry.bytes;
    }
  }
  return holdings;
}

}  // namespace cuseq
