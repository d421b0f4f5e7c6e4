#include <ATen/CachedTensorUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

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

bool read_enabled() {
  const char* value = std::getenv("CUSEQ_CACHE");
  return value == nullptr || std::strcmp(value, "0") != 0;
}

int64_t read_limit(const char* name, int64_t fallback) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  char* end = nullptr;
  const int64_t limit = std::strtoll(value, &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && limit >= 0, name, " must be a number of at least 0, got '",
                    value, "'");
  return limit;
}

// Innermost open scope last. Entries made outside any scope have number 0.
thread_local std::vector<uint64_t> open_scopes;

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

struct IdentityCache::Entry {
  // The key. Weak references keep the addresses from being recycled, not the data alive.
  c10::weak_intrusive_ptr<c10::TensorImpl> key;
  const c10::TensorImpl* key_address;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const c10::StorageImpl* storage_address;
  int64_t version;
  int64_t storage_offset;
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  CachedOp op;
  c10::Device device;
  int64_t parameter;

  at::Tensor value;
  int64_t value_version;
  int64_t bytes;
  uint64_t scope;
  uint64_t last_use = 0;

  // Where and when the value was made, for hits from other streams.
  std::optional<c10::Stream> stream;
  std::shared_ptr<c10::Event> made;

  Entry(const CacheQuery& query, int64_t key_version, const at::Tensor& made_value)
      : key(query.key.getIntrusivePtr()),
        key_address(query.key.unsafeGetTensorImpl()),
        storage(query.key.storage().getWeakStorageImpl()),
        storage_address(query.key.storage().unsafeGetStorageImpl()),
        version(key_version),
        storage_offset(query.key.storage_offset()),
        dtype(query.key.scalar_type()),
        sizes(query.key.sizes().vec()),
        strides(query.key.strides().vec()),
        op(query.op),
        device(query.device),
        parameter(query.parameter),
        value(made_value),
        value_version(made_value._version()),
        bytes(static_cast<int64_t>(made_value.storage().nbytes())),
        scope(open_scopes.empty() ? 0 : open_scopes.back()),
        stream(current_stream(made_value.device())) {
    if (stream.has_value()) {
      made = std::make_shared<c10::Event>(stream->device_type());
      made->record(*stream);
    }
  }

  bool asked_by(const CacheQuery& query) const {
    return key_address == query.key.unsafeGetTensorImpl() && op == query.op &&
           device == query.device && parameter == query.parameter;
  }

  // The key, or the value a caller was given, may have been edited or rebound since.
  bool still_right(const at::Tensor& now) const {
    return version == now._version() && storage_address == now.storage().unsafeGetStorageImpl() &&
           storage_offset == now.storage_offset() && dtype == now.scalar_type() &&
           now.sizes() == c10::IntArrayRef(sizes) && now.strides() == c10::IntArrayRef(strides) &&
           value_version == value._version();
  }
};

IdentityCache& IdentityCache::instance() {
  // Never destroyed: at exit, tensors may outlive the library's statics, and their death would
  // reach for the cache.
  static auto* cache = new IdentityCache();
  return *cache;
}

IdentityCache::IdentityCache()
    : enabled_(read_enabled()),
      max_entries_(read_limit("CUSEQ_CACHE_MAX_ENTRIES", 64)),
      max_bytes_(read_limit("CUSEQ_CACHE_MAX_BYTES", std::numeric_limits<int64_t>::max())) {
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

bool IdentityCache::usable_for(const at::Tensor& key) const {
  return enabled_ && !c10::impl::dispatch_mode_enabled() &&
         !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchingModes) &&
         !key.key_set().has_any(kNotPlainData) && !key.is_meta() && key.has_storage() &&
         !key.is_inference() && !is_capturing(key) &&
         // What cudagraph trees return at every replay: new values, the same version.
         !at::caching::is_cached_tensor(key);
}

IdentityCache::Shard& IdentityCache::shard_of(const c10::TensorImpl* key) {
  // The low bits of an address are its alignment.
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
  move_out_if([](const Entry& entry) { return entry.key.expired(); }, dead);
}

void IdentityCache::make_room(Entries& dead) {
  while (entries_.load(std::memory_order_relaxed) > max_entries_ ||
         bytes_.load(std::memory_order_relaxed) > max_bytes_) {
    Shard* shard_of_oldest = nullptr;
    uint64_t oldest = std::numeric_limits<uint64_t>::max();
    for (Shard& shard : shards_) {
      if (shard.size.load(std::memory_order_relaxed) == 0) continue;
      const std::lock_guard<std::mutex> lock(shard.mutex);
      for (const Entry& entry : shard.entries) {
        if (entry.last_use >= oldest) continue;
        oldest = entry.last_use;
        shard_of_oldest = &shard;
      }
    }
    if (shard_of_oldest == nullptr) return;
    const size_t dead_before = dead.size();
    // Used again meanwhile: then another one is the oldest.
    move_out_if(
        *shard_of_oldest, [oldest](const Entry& entry) { return entry.last_use == oldest; }, dead);
    evictions_.fetch_add(static_cast<int64_t>(dead.size() - dead_before),
                         std::memory_order_relaxed);
  }
}

IdentityCache::Hit IdentityCache::look_up(const CacheQuery& query,
                                          const std::optional<c10::Stream>& current, Count count) {
  Entries dead;
  Shard& shard = shard_of(query.key.unsafeGetTensorImpl());
  const std::lock_guard<std::mutex> lock(shard.mutex);
  const auto entry = std::ranges::find_if(
      shard.entries, [&](const Entry& candidate) { return candidate.asked_by(query); });
  const bool found = entry != shard.entries.end() && entry->still_right(query.key);
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

std::optional<at::Tensor> IdentityCache::find_at_once(const CacheQuery& query) {
  Hit hit = look_up(query, current_stream(query.device), Count::kHitsAtOnce);
  if (!hit.value.defined()) return std::nullopt;
  return std::move(hit.value);
}

std::optional<at::Tensor> IdentityCache::find(const CacheQuery& query) {
  if (watcher_.watch == nullptr) {
    Entries dead;
    move_out_expired(dead);
  }
  const std::optional<c10::Stream> current = current_stream(query.device);
  Hit hit = look_up(query, current, Count::kAlways);
  if (!hit.value.defined()) return std::nullopt;
  if (hit.made_elsewhere != nullptr) {
    hit.made_elsewhere->block(*current);
    hit.value.record_stream(*current);
  }
  return std::move(hit.value);
}

void IdentityCache::insert(const CacheQuery& query, int64_t version, const at::Tensor& value) {
  Entries dead;
  Entries fresh;
  Entry& entry = fresh.emplace_back(query, version, value);
  if (entry.bytes > max_bytes_) return;
  move_out_expired(dead);
  bool first_of_key = true;
  {
    Shard& shard = shard_of(entry.key_address);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    for (auto other = shard.entries.begin(); other != shard.entries.end();) {
      const auto current = other++;
      if (current->key_address != entry.key_address) continue;
      first_of_key = false;
      // Another thread may have computed the same meanwhile.
      if (current->asked_by(query)) move_out(shard, current, dead);
    }
    entry.last_use = clock_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(entry.bytes, std::memory_order_relaxed);
    entries_.fetch_add(1, std::memory_order_relaxed);
    shard.entries.splice(shard.entries.end(), fresh);
    shard.size.store(shard.entries.size(), std::memory_order_relaxed);
  }
  make_room(dead);
  if (first_of_key && watcher_.watch != nullptr) watcher_.watch(query.key);
}

void IdentityCache::invalidate(const at::Tensor& key) {
  const c10::TensorImpl* address = key.unsafeGetTensorImpl();
  drop_key(address);
  if (watcher_.unwatch != nullptr) watcher_.unwatch(address);
}

void IdentityCache::drop_key(const c10::TensorImpl* key) {
  Entries dead;
  move_out_if(shard_of(key), [key](const Entry& entry) { return entry.key_address == key; }, dead);
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

}  // namespace cuseq
