#include "python/cache.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <utility>
#include <vector>

#include "cuseq/ops.h"
#include "python/arguments.h"

namespace cuseq::python {

CachedValuePtr find_at_once(const CacheQuery& query) {
  IdentityCache& cache = IdentityCache::instance();
  return cache.usable_for(query) ? cache.find_at_once(query) : nullptr;
}

std::optional<Identities> identities_to_keep(const CacheQuery& query) {
  if (c10::InferenceMode::is_enabled()) return std::nullopt;
  if (!IdentityCache::instance().usable_for(query)) return std::nullopt;
  return identities_of(query);
}

void keep(const CacheQuery& query, std::optional<Identities> before,
          decltype(CachedValue::tensors) tensors, py::object object, bool outlives_scopes) {
  if (!before.has_value()) return;
  // Any thread may drop the object, so its deleter takes the GIL.
  std::shared_ptr<void> kept(object.release().ptr(), [](void* released) {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(released));
  });
  IdentityCache::instance().insert(
      query, *std::move(before),
      std::make_shared<const CachedValue>(CachedValue{std::move(tensors), std::move(kept)}),
      outlives_scopes);
}

py::object object_of(const CachedValue& value) {
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(value.object.get()));
}

namespace {

at::Tensor cached_tensor(const CacheQuery& query) {
  if (const auto hit = find_at_once(query)) return hit->tensors[0];
  const py::gil_scoped_release released;
  return cached_value(query)->tensors[0];
}

at::Tensor cached_cu_seqlens(py::handle lengths) {
  const at::Tensor& key = dense_argument(lengths, "lengths");
  return cached_tensor({key, CachedOp::kCuSeqlens, key.device()});
}

template <CachedOp op>
at::Tensor cached_per_token(py::handle lengths, py::handle total_tokens) {
  const at::Tensor& key = dense_argument(lengths, "lengths");
  return cached_tensor({key, op, key.device(), {int_argument(total_tokens, "total_tokens")}});
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

// Return torch's BlockMask, made by build(ranges, tensors, row_length, block_size, causal,
// has_spans) unless it is cached.
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
    value = cached_value(query);
  }
  if (value->object != nullptr) return object_of(*value);
  const auto& tensors = value->tensors;
  py::object object =
      build(tensors.back(), std::vector<at::Tensor>(tensors.begin(), tensors.end() - 1), row_length,
            std::pair(query_block, key_block), causal, spans.has_value());
  keep(query, std::move(before), tensors, object);
  return object;
}

py::dict stats() {
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
  m.def("cached_cu_seqlens", &cached_cu_seqlens);
  m.def("cached_position_ids", &cached_per_token<CachedOp::kPositionIds>);
  m.def("cached_seq_ids", &cached_per_token<CachedOp::kSeqIds>);
  m.def("cached_dense_mask", &cached_dense_mask);
  m.def("cached_block_mask", &cached_block_mask);
  m.def("remember_on_host", &remember_on_host);
  m.def("cache_stats", &stats);
  m.def("clear_cache", [] { IdentityCache::instance().clear(); });
  m.def("invalidate", [](py::handle tensor) {
    IdentityCache::instance().invalidate(tensor_argument(tensor, "tensor"));
  });
  m.def("enter_scope", [] { return IdentityCache::instance().enter_scope(); });
  m.def("exit_scope", [](uint64_t scope) { IdentityCache::instance().exit_scope(scope); });
  bind_facts(m);
  try {
    IdentityCache::instance().set_watcher(key_watcher());
  } catch (const c10::Error&) {  // an invalid environment variable: the import raises this error
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}

}  // namespace cuseq::python
