#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "cuseq/rope.h"

// What cannot be an op: the cache's controls, a hit cheaper than the dispatcher allows, and waiting
// for the host copy of device lengths.
//
// The GIL guards the table of watched keys: the module does not declare itself safe without it, so
// a free-threaded Python turns its GIL on when it imports this.
namespace {

namespace py = pybind11;

using cuseq::CachedOp;

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
    cuseq::IdentityCache::instance().drop_key(address);
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
cuseq::CachedValuePtr find_at_once(const cuseq::CacheQuery& query) {
  cuseq::IdentityCache& cache = cuseq::IdentityCache::instance();
  return cache.usable_for(query) ? cache.find_at_once(query) : nullptr;
}

at::Tensor cached_tensor(const cuseq::CacheQuery& query) {
  if (const auto hit = find_at_once(query)) return hit->tensors[0];
  const py::gil_scoped_release released;
  return cuseq::packed(query)->tensors[0];
}

using OptionalTensor = std::optional<at::Tensor>;

cuseq::MaskOptions mask_options(const at::Tensor& cu_seqlens, int64_t total_tokens, bool causal,
                                std::optional<int64_t> window, const OptionalTensor& spans,
                                const OptionalTensor& padded) {
  return {cu_seqlens, total_tokens, /*from_cu_seqlens=*/true, causal, window, spans, padded};
}

at::Tensor cached_dense_mask(const at::Tensor& cu_seqlens, int64_t total_tokens, bool causal,
                             std::optional<int64_t> window, const OptionalTensor& spans,
                             const OptionalTensor& padded, std::optional<int64_t> row_length,
                             at::ScalarType dtype, bool finite) {
  const auto options = mask_options(cu_seqlens, total_tokens, causal, window, spans, padded);
  return cached_tensor(cuseq::dense_mask_query(options, row_length, dtype, finite));
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
std::optional<cuseq::Identities> identities_to_keep(const cuseq::CacheQuery& query) {
  if (c10::InferenceMode::is_enabled()) return std::nullopt;
  if (!cuseq::IdentityCache::instance().usable_for(query)) return std::nullopt;
  return cuseq::identities_of(query);
}

// Keeps the object with the tensors that it was built from.
void keep(const cuseq::CacheQuery& query, std::optional<cuseq::Identities> before,
          decltype(cuseq::CachedValue::tensors) tensors, const py::object& object) {
  if (!before.has_value()) return;
  cuseq::IdentityCache::instance().insert(
      query, *std::move(before),
      std::make_shared<const cuseq::CachedValue>(
          cuseq::CachedValue{std::move(tensors), kept(object)}));
}

py::object object_of(const cuseq::CachedValue& value) {
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(value.object.get()));
}

// build(ranges, tensors, row_length, block_size, reads_end) makes torch's BlockMask of them.
py::object cached_block_mask(const at::Tensor& cu_seqlens, int64_t total_tokens, bool causal,
                             std::optional<int64_t> window, const OptionalTensor& spans,
                             const OptionalTensor& padded, std::optional<int64_t> row_length,
                             int64_t query_block, int64_t key_block, const py::function& build) {
  const auto options = mask_options(cu_seqlens, total_tokens, causal, window, spans, padded);
  const auto query = cuseq::block_mask_query(options, row_length, query_block, key_block);
  cuseq::CachedValuePtr value = find_at_once(query);
  if (value != nullptr && value->object != nullptr) return object_of(*value);
  auto before = identities_to_keep(query);
  {
    const py::gil_scoped_release released;
    value = cuseq::packed(query);
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
  cuseq::check_window(window);
  cuseq::CacheQuery query{lengths, CachedOp::kXformersBias, lengths.device()};
  query.parameters.window = window.value_or(0);
  cuseq::CachedValuePtr value = find_at_once(query);
  if (value == nullptr && cuseq::IdentityCache::instance().usable_for(query)) {
    const py::gil_scoped_release released;
    value = cuseq::IdentityCache::instance().find(query);
  }
  if (value != nullptr) return object_of(*value);
  auto before = identities_to_keep(query);
  auto [object, tensors] = py::cast<std::pair<py::object, std::vector<at::Tensor>>>(build());
  keep(query, std::move(before), {tensors.begin(), tensors.end()}, object);
  return object;
}

// The rotations, past the boxing of arguments that a call of torch.ops costs.
using Pair = std::tuple<at::Tensor, OptionalTensor>;

struct QueryAndKey {
  QueryAndKey(const at::Tensor& q, const OptionalTensor& k) {
    tensors.push_back(q);
    if (k.has_value()) tensors.push_back(*k);
  }

  static Pair pair(std::vector<at::Tensor>& turned) {
    return {std::move(turned[0]),
            turned.size() == 2 ? OptionalTensor(std::move(turned[1])) : std::nullopt};
  }

  c10::SmallVector<at::Tensor, 2> tensors;
};

template <typename... Front>
struct RopeBinding {
  template <auto function>
  static auto call(Front... front, const at::Tensor& cos, const at::Tensor& sin,
                   const OptionalTensor& cu_seqlens, const OptionalTensor& host_meta,
                   const OptionalTensor& position_ids, c10::SymInt offset, const std::string& table,
                   const std::string& qkv_format, bool interleaved, std::optional<int64_t> rotary_dim,
                   const std::optional<std::vector<int64_t>>& mrope_section, bool mrope_interleaved,
                   int64_t cp_size, int64_t cp_rank, bool inplace) {
    cuseq::RopeOptions options{
        cos,     sin,     cu_seqlens,  host_meta,  position_ids, std::move(offset),
        table,   qkv_format, interleaved, rotary_dim, std::nullopt, mrope_interleaved,
        cp_size, cp_rank, false};
    if (mrope_section.has_value()) options.mrope_section = at::IntArrayRef(*mrope_section);
    return function(front..., options, inplace);
  }
};

Pair apply_rope(const at::Tensor& q, const OptionalTensor& k, const cuseq::RopeOptions& options,
                bool inplace) {
  const QueryAndKey both(q, k);
  if (inplace) {
    cuseq::apply_rope_(both.tensors, options);
    return {q, k};
  }
  auto turned = cuseq::apply_rope(both.tensors, options);
  return QueryAndKey::pair(turned);
}

Pair apply_qk_norm_rope(const at::Tensor& q, const OptionalTensor& k, const at::Tensor& q_weight,
                        const OptionalTensor& k_weight, double eps, double weight_offset,
                        const cuseq::RopeOptions& options, bool inplace) {
  const QueryAndKey both(q, k);
  const QueryAndKey weights(q_weight, k_weight);
  if (inplace) {
    cuseq::apply_qk_norm_rope_(both.tensors, weights.tensors, eps, weight_offset, options);
    return {q, k};
  }
  auto turned = std::get<0>(
      cuseq::apply_qk_norm_rope(both.tensors, weights.tensors, eps, weight_offset, options));
  return QueryAndKey::pair(turned);
}

py::dict cache_stats() {
  const cuseq::CacheStats stats = cuseq::IdentityCache::instance().stats();
  py::dict result;
  result["hits"] = stats.hits;
  result["misses"] = stats.misses;
  result["bypasses"] = stats.bypasses;
  result["evictions"] = stats.evictions;
  result["bytes"] = stats.bytes;
  result["entries"] = stats.entries;
  return result;
}

py::dict build_info() {
  py::dict info;
#ifdef CUSEQ_WITH_CUDA
  info["cuda"] = true;
  info["cuda_archs"] = CUSEQ_CUDA_ARCHS;
#else
  info["cuda"] = false;
  info["cuda_archs"] = "";
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  // What torch raises from its own bindings: ValueError and TypeError, without a C++ stack.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (python_error& raised) {  // in Python, which a hook or a dispatch mode ran
      raised.restore();
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(std::current_exception());
    }
  });

  using Released = py::call_guard<py::gil_scoped_release>;
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
  m.def("remember_on_host", &cuseq::remember_on_host);
  m.def("check_spans_and_rows", &cuseq::check_spans_and_rows);
  m.def("tokens_of", &cuseq::tokens_of, Released());
  m.def("start_host_copy", &cuseq::start_host_copy, Released());
  m.def("copy_to_device", &cuseq::copy_to_device, Released());
  m.def("wait_host_copy", &cuseq::wait_host_copy, Released());
  m.def("read_host_meta", &cuseq::read_host_meta, Released());

  using Rope = RopeBinding<const at::Tensor&, const OptionalTensor&>;
  m.def("apply_rope", &Rope::call<&apply_rope>, Released(), py::arg("q"), py::arg("k"),
        py::arg("cos"), py::arg("sin"), py::arg("cu_seqlens"), py::arg("host_meta"),
        py::arg("position_ids"), py::arg("offset"), py::arg("table"), py::arg("qkv_format"),
        py::arg("interleaved"), py::arg("rotary_dim"), py::arg("mrope_section"),
        py::arg("mrope_interleaved"), py::arg("cp_size"), py::arg("cp_rank"), py::arg("inplace"));
  using NormRope = RopeBinding<const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                               const OptionalTensor&, double, double>;
  m.def("apply_qk_norm_rope", &NormRope::call<&apply_qk_norm_rope>, Released(), py::arg("q"),
        py::arg("k"), py::arg("q_weight"), py::arg("k_weight"), py::arg("eps"),
        py::arg("weight_offset"), py::arg("cos"), py::arg("sin"), py::arg("cu_seqlens"),
        py::arg("host_meta"), py::arg("position_ids"), py::arg("offset"), py::arg("table"),
        py::arg("qkv_format"), py::arg("interleaved"), py::arg("rotary_dim"), py::arg("mrope_section"),
        py::arg("mrope_interleaved"), py::arg("cp_size"), py::arg("cp_rank"), py::arg("inplace"));

  m.def("cache_stats", &cache_stats);
  m.def("clear_cache", [] { cuseq::IdentityCache::instance().clear(); });
  m.def("invalidate",
        [](const at::Tensor& key) { cuseq::IdentityCache::instance().invalidate(key); });
  m.def("enter_scope", [] { return cuseq::IdentityCache::instance().enter_scope(); });
  m.def("exit_scope", [](uint64_t scope) { cuseq::IdentityCache::instance().exit_scope(scope); });
  m.def("build_info", &build_info);

  try {
    cuseq::device_checks_enabled();
    cuseq::IdentityCache::instance().set_watcher({&watch, &unwatch});
  } catch (const c10::Error&) {  // of an environment variable; the import raises it as it is
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}
