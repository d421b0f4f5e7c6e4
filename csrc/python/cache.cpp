#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "ops/checks.h"
#include "python/bindings.h"

// The GIL guards the table of watched keys: the module does not declare itself safe without it, so
// a free-threaded Python turns its GIL on when it imports this.
namespace cuseq::python {
namespace {

// Weak references to the wrappers of live keys; the callback drops a key's entries as it dies.
// Guarded by the GIL. Never destroyed: at exit there is no interpreter left to release them in.
std::unordered_map<const c10::TensorImpl*, PyObject*>& watched() {
  static auto* references = new std::unordered_map<const c10::TensorImpl*, PyObject*>();
  return *references;
}

void unwatch_with_gil(const c10::TensorImpl* key) {
  const auto found = watched().find(key);
  if (found == watched().end()) return;
  PyObject* reference = found->second;
  watched().erase(found);
  Py_DECREF(reference);
}

void watch(const at::Tensor& key) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  const c10::TensorImpl* address = key.unsafeGetTensorImpl();
  if (watched().count(address) != 0) return;
  const py::object wrapper = py::reinterpret_steal<py::object>(THPVariable_Wrap(key));
  const py::cpp_function on_death([address](const py::handle&) {
    // The storage of a reference that died is this callback's own: released after the entries.
    IdentityCache::instance().drop_key(address);
    unwatch_with_gil(address);
  });
  PyObject* reference = PyWeakref_NewRef(wrapper.ptr(), on_death.ptr());
  if (reference == nullptr) throw py::error_already_set();
  watched().emplace(address, reference);
}

void unwatch(const c10::TensorImpl* key) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  unwatch_with_gil(key);
}

// A hit costs less than giving up the GIL and queueing for it again, so it keeps it.
CachedValuePtr find_at_once(const CacheQuery& query) {
  IdentityCache& cache = IdentityCache::instance();
  return cache.usable_for(query) ? cache.find_at_once(query) : nullptr;
}

at::Tensor cached_tensor(const CacheQuery& query) {
  if (const auto hit = find_at_once(query)) return hit->tensors[0];
  const py::gil_scoped_release released;
  return packed(query)->tensors[0];
}
MaskOptions mask_options(const at::Tensor& cu_seqlens, int64_t total_tokens, bool causal,
                         std::optional<int64_t> window, const OptionalTensor& spans,
                         const OptionalTensor& padded) {
  return {cu_seqlens, total_tokens, /*from_cu_seqlens=*/true, causal, window, spans, padded};
}

at::Tensor cached_dense_mask(const at::Tensor& cu_seqlens, int64_t total_tokens, bool causal,
                             std::optional<int64_t> window, const OptionalTensor& spans,
                             const OptionalTensor& padded, std::optional<int64_t> row_length,
                             at::ScalarType dtype, bool finite) {
  const auto options = mask_options(cu_seqlens, total_tokens, causal, window, spans, padded);
  return cached_tensor(dense_mask_query(options, row_length, dtype, finite));
}

// A Python object that the cache keeps, released under the GIL by whoever drops it.
std::shared_ptr<void> kept(py::object object) {
  return {object.release().ptr(), [](void* released) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(released));
          }};
}

// Where a value may be kept: the query's tensors as they are now.
std::optional<Identities> identities_to_keep(const CacheQuery& query) {
  if (c10::InferenceMode::is_enabled()) return std::nullopt;
  if (!IdentityCache::instance().usable_for(query)) return std::nullopt;
  return identities_of(query);
}

// Keeps the object with the tensors that it was built from.
void keep(const CacheQuery& query, std::optional<Identities> before,
          decltype(CachedValue::tensors) tensors, const py::object& object) {
  if (!before.has_value()) return;
  IdentityCache::instance().insert(
      query, *std::move(before),
      std::make_shared<const CachedValue>(CachedValue{std::move(tensors), kept(object)}));
}

py::object object_of(const CachedValue& value) {
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(value.object.get()));
}

// build(ranges, tensors, row_length, block_size, reads_end) makes torch's BlockMask of them.
py::object cached_block_mask(const at::Tensor& cu_seqlens, int64_t total_tokens, bool causal,
                             std::optional<int64_t> window, const OptionalTensor& spans,
                             const OptionalTensor& padded, std::optional<int64_t> row_length,
                             int64_t query_block, int64_t key_block, const py::function& build) {
  const auto options = mask_options(cu_seqlens, total_tokens, causal, window, spans, padded);
  const auto query = block_mask_query(options, row_length, query_block, key_block);
  CachedValuePtr value = find_at_once(query);
  if (value != nullptr && value->object != nullptr) return object_of(*value);
  auto before = identities_to_keep(query);
  {
    const py::gil_scoped_release released;
    value = packed(query);
  }
  if (value->object != nullptr) return object_of(*value);
  const auto& tensors = value->tensors;
  py::object object =
      build(tensors.back(), std::vector<at::Tensor>(tensors.begin(), tensors.end() - 1), row_length,
            std::pair(query_block, key_block), !causal || spans.has_value());
  keep(query, std::move(before), tensors, object);
  return object;
}

// build() makes xformers' bias of a layout, whose lengths are the key, and lists the tensors that
// it made for it.
py::object cached_xformers_bias(const at::Tensor& lengths, std::optional<int64_t> window,
                                const py::function& build) {
  check_window(window);
  CacheQuery query{lengths, CachedOp::kXformersBias, lengths.device()};
  query.parameters.window = window.value_or(0);
  CachedValuePtr value = find_at_once(query);
  if (value == nullptr && IdentityCache::instance().usable_for(query)) {
    const py::gil_scoped_release released;
    value = IdentityCache::instance().find(query);
  }
  if (value != nullptr) return object_of(*value);
  auto before = identities_to_keep(query);
  auto [object, tensors] = py::cast<std::pair<py::object, std::vector<at::Tensor>>>(build());
  keep(query, std::move(before), {tensors.begin(), tensors.end()}, object);
  return object;
}

py::dict cache_stats() {
  const CacheStats stats = IdentityCache::instance().stats();
  py::dict result;
  result["hits"] = stats.hits;
  result["misses"] = stats.misses;
  result["bypasses"] = stats.bypasses;
  result["evictions"] = stats.evictions;
  result["bytes"] = stats.bytes;
  result["entries"] = stats.entries;
  return result;
}

}  // namespace

void bind_cache(py::module_& m) {
  m.def("cached_cu_seqlens", [](const at::Tensor& lengths) {
    return cached_tensor({lengths, CachedOp::kCuSeqlens, lengths.device()});
  });
  m.def("cached_position_ids", [](const at::Tensor& lengths, int64_t total_tokens) {
    return cached_tensor({lengths, CachedOp::kPositionIds, lengths.device(), {total_tokens}});
  });
  m.def("cached_seq_ids", [](const at::Tensor& lengths, int64_t total_tokens) {
    return cached_tensor({lengths, CachedOp::kSeqIds, lengths.device(), {total_tokens}});
  });
  m.def("cached_dense_mask", &cached_dense_mask);
  m.def("cached_block_mask", &cached_block_mask);
  m.def("cached_xformers_bias", &cached_xformers_bias);
  m.def("remember_on_host", &remember_on_host);
  m.def("cache_stats", &cache_stats);
  m.def("clear_cache", [] { IdentityCache::instance().clear(); });
  m.def("invalidate", [](const at::Tensor& key) { IdentityCache::instance().invalidate(key); });
  m.def("enter_scope", [] { return IdentityCache::instance().enter_scope(); });
  m.def("exit_scope", [](uint64_t scope) { IdentityCache::instance().exit_scope(scope); });
  try {
    IdentityCache::instance().set_watcher({&watch, &unwatch});
  } catch (const c10::Error&) {  // of an environment variable; the import raises it as it is
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}

}  // namespace cuseq::python
