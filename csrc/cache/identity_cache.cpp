#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "cuseq/cache.h"

namespace cuseq {
namespace {

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
      max_bytes_(read_limit("CUSEQ_CACHE_MAX_BYTES", std::numeric_limits<int64_t>::max())) {}

IdentityCache::Entries& IdentityCache::bucket_of(const c10::TensorImpl* key) {
  // The low bits of an address are its alignment.
  return buckets_[(reinterpret_cast<uintptr_t>(key) >> 6) % kBuckets];
}

void IdentityCache::move_out(Entries& bucket, Entries::iterator entry, Entries& dead) {
  stats_.bytes -= entry->bytes;
  stats_.entries -= 1;
  dead.splice(dead.end(), bucket, entry);
}

void IdentityCache::move_out_if(const std::function<bool(const Entry&)>& is_dead, Entries& dead) {
  for (Entries& bucket : buckets_) {
    for (auto entry = bucket.begin(); entry != bucket.end();) {
      const auto current = entry++;
      if (is_dead(*current)) move_out(bucket, current, dead);
    }
  }
}

void IdentityCache::make_room(Entries& dead) {
  while (stats_.entries > max_entries_ || stats_.bytes > max_bytes_) {
    Entries* oldest_bucket = nullptr;
    Entries::iterator oldest;
    for (Entries& bucket : buckets_) {
      for (auto entry = bucket.begin(); entry != bucket.end(); ++entry) {
        if (oldest_bucket == nullptr || entry->last_use < oldest->last_use) {
          oldest_bucket = &bucket;
          oldest = entry;
        }
      }
    }
    if (oldest_bucket == nullptr) return;
    move_out(*oldest_bucket, oldest, dead);
    stats_.evictions += 1;
  }
}

std::optional<at::Tensor> IdentityCache::find(const CacheQuery& query) {
  Entries dead;
  at::Tensor value;
  std::optional<c10::Stream> stream;
  std::shared_ptr<c10::Event> made;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entries& bucket = bucket_of(query.key.unsafeGetTensorImpl());
    for (auto entry = bucket.begin(); entry != bucket.end(); ++entry) {
      if (!entry->asked_by(query)) continue;
      if (!entry->still_right(query.key)) {
        move_out(bucket, entry, dead);
        break;
      }
      entry->last_use = ++clock_;
      value = entry->value;
      stream = entry->stream;
      made = entry->made;
      break;
    }
    value.defined() ? ++stats_.hits : ++stats_.misses;
  }
  if (!value.defined()) return std::nullopt;
  if (stream.has_value()) {
    const c10::Stream current = *current_stream(value.device());
    if (current != *stream) {
      made->block(current);
      value.record_stream(current);
    }
  }
  return value;
}

void IdentityCache::insert(const CacheQuery& query, int64_t version, const at::Tensor& value) {
  Entries dead;
  Entries fresh;
  fresh.emplace_back(query, version, value);
  bool first_of_key = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    move_out_if([](const Entry& entry) { return entry.key.expired(); }, dead);
    Entries& bucket = bucket_of(query.key.unsafeGetTensorImpl());
    for (auto entry = bucket.begin(); entry != bucket.end();) {
      const auto current = entry++;
      // Another thread may have computed the same meanwhile.
      if (current->asked_by(query)) {
        move_out(bucket, current, dead);
        first_of_key = false;
      } else if (current->key_address == query.key.unsafeGetTensorImpl()) {
        first_of_key = false;
      }
    }
    fresh.front().last_use = ++clock_;
    stats_.bytes += fresh.front().bytes;
    stats_.entries += 1;
    bucket.splice(bucket.end(), fresh);
    make_room(dead);
  }
  if (first_of_key && watcher_.watch != nullptr) watcher_.watch(query.key);
}

void IdentityCache::count_bypass() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.bypasses;
}

void IdentityCache::invalidate(const at::Tensor& key) {
  const c10::TensorImpl* address = key.unsafeGetTensorImpl();
  drop_key(address);
  if (watcher_.unwatch != nullptr) watcher_.unwatch(address);
}

void IdentityCache::drop_key(const c10::TensorImpl* key) {
  Entries dead;
  const std::lock_guard<std::mutex> lock(mutex_);
  Entries& bucket = bucket_of(key);
  for (auto entry = bucket.begin(); entry != bucket.end();) {
    const auto current = entry++;
    if (current->key_address == key) move_out(bucket, current, dead);
  }
}

void IdentityCache::clear() {
  Entries dead;
  const std::lock_guard<std::mutex> lock(mutex_);
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
  const std::lock_guard<std::mutex> lock(mutex_);
  move_out_if([scope](const Entry& entry) { return entry.scope == scope; }, dead);
}

CacheStats IdentityCache::stats() {
  Entries dead;
  const std::lock_guard<std::mutex> lock(mutex_);
  move_out_if([](const Entry& entry) { return entry.key.expired(); }, dead);
  return stats_;
}

}  // namespace cuseq
