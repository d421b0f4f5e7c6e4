#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/shared_plans.h"
#include "cache/host_copies.h"
#include "python/arguments.h"
#include "python/cache.h"

// Facts whose values are Python objects. A Python callable makes them; the identity cache keeps
// them like all others.
namespace cuseq::python {
namespace {

using Tensors = decltype(CachedValue::tensors);

// Maps facts, (name, parameters), to numbers, so that the cache compares no Python objects while it
// holds a mutex. Numbers are never reused. Guarded by the GIL, never destroyed.
class FactNumbers {
 public:
  static FactNumbers& instance() {
    static auto* numbers = new FactNumbers();
    return *numbers;
  }

  int64_t number_of(py::handle fact) {
    PyObject* known = PyDict_GetItemWithError(numbers_.ptr(), fact.ptr());
    if (known != nullptr) return PyLong_AsLongLong(known);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    // Forget all numbers, because parameters that no entry uses any more would accumulate. Entries
    // under forgotten numbers are never hit again and get evicted as least recently used.
    if (numbers_.size() >= kMostNumbers) numbers_.clear();
    const int64_t number =
        (last_++ << kKindBits) | kind_of(py::cast<std::string>(fact[py::int_(0)]));
    numbers_[fact] = number;
    return number;
  }

  const std::string& name_of(int64_t number) const {
    return names_[number & ((int64_t{1} << kKindBits) - 1)];
  }
  const std::vector<std::string>& names() const { return names_; }

 private:
  static constexpr size_t kMostNumbers = 4096;
  static constexpr int kKindBits = 10;

  int64_t kind_of(const std::string& name) {
    const auto found = std::ranges::find(names_, name);
    if (found != names_.end()) return found - names_.begin();
    TORCH_INTERNAL_ASSERT(names_.size() < size_t{1} << kKindBits, "facts have too many names");
    names_.push_back(name);
    return static_cast<int64_t>(names_.size()) - 1;
  }

  py::dict numbers_;
  int64_t last_ = 0;
  std::vector<std::string> names_;  // only a few: they are literals in this package's source
};

CacheQuery query_of(const at::Tensor& key, py::handle device) {
  return {key, CachedOp::kObject, device_argument(device, key.device())};
}

// Return the tensors of a value: those that list(value) gives or, if `list` is None, the value
// itself or the tensors in a tuple.
Tensors tensors_in(const py::object& value, py::handle list) {
  Tensors tensors;
  if (!list.is_none()) {
    for (const py::handle& item : list(value)) {
      tensors.push_back(tensor_argument(item, "each of tensors(value)"));
    }
  } else if (THPVariable_Check(value.ptr())) {
    tensors.push_back(THPVariable_Unpack(value.ptr()));
  } else if (PyTuple_Check(value.ptr())) {
    for (const py::handle& item : py::reinterpret_borrow<py::tuple>(value)) {
      if (THPVariable_Check(item.ptr())) tensors.push_back(THPVariable_Unpack(item.ptr()));
    }
  }
  return tensors;
}

py::object remember(py::handle key, py::handle fact, py::handle make, py::handle device,
                    py::handle tensors, bool outlives_scopes) {
  CacheQuery query = query_of(tensor_argument(key, "key"), device);
  IdentityCache& cache = IdentityCache::instance();
  if (!cache.usable_for(query)) {
    cache.count_bypass();
    return make();
  }
  query.parameters.fact = FactNumbers::instance().number_of(fact);
  CachedValuePtr hit = cache.find_at_once(query);
  if (hit == nullptr) {
    const py::gil_scoped_release released;
    hit = cache.find(query);
  }
  if (hit != nullptr) return object_of(*hit);
  auto before = identities_to_keep(query);
  py::object value = make();
  if (!before.has_value()) return value;
  Tensors in_value = tensors_in(value, tensors);
  TORCH_CHECK(
      std::ranges::none_of(in_value,
                           [&](const at::Tensor& tensor) { return tensor.is_same(query.key); }),
      "the value of a fact must not contain its key tensor, which would then never be freed");
  if (std::ranges::all_of(in_value, has_identity)) {
    keep(query, std::move(before), std::move(in_value), value, outlives_scopes);
  }
  return value;
}

bool keeps(py::handle key, py::handle device) {
  return !c10::InferenceMode::is_enabled() &&
         IdentityCache::instance().usable_for(query_of(tensor_argument(key, "key"), device));
}

// Return a new key tensor: a plain tensor whatever modes are active, so that facts of it are kept.
at::Tensor new_key() {
  const c10::InferenceMode outside(false);
  return at::Tensor(at::detail::empty_cpu({0}, at::TensorOptions(at::kByte)));
}

py::dict info() {
  py::dict kinds;
  const auto add = [&](const std::string& name, int64_t entries, int64_t bytes) {
    const py::str key(name);
    if (!kinds.contains(key)) {
      py::dict none;
      none["entries"] = 0;
      none["bytes"] = 0;
      kinds[key] = none;
    }
    py::object kind = kinds[key];
    kind["entries"] = py::cast<int64_t>(kind["entries"]) + entries;
    kind["bytes"] = py::cast<int64_t>(kind["bytes"]) + bytes;
  };
  for (size_t i = 0; i < kCachedOps; ++i) {
    const auto op = static_cast<CachedOp>(i);
    if (op != CachedOp::kObject) add(name_of(op), 0, 0);
  }
  for (const std::string& name : FactNumbers::instance().names()) add(name, 0, 0);
  for (const CacheHolding& held : IdentityCache::instance().holdings()) {
    const bool is_object = held.op == CachedOp::kObject;
    add(is_object ? FactNumbers::instance().name_of(held.fact) : name_of(held.op), held.entries,
        held.bytes);
  }
  add("pending_host_copy", pending_host_copies(), 0);
  add("cudnn_plan", attention::plans_made(), 0);
  return kinds;
}

}  // namespace

void bind_facts(py::module_& m) {
  m.def("remember", &remember);
  m.def("keeps", &keeps);
  m.def("new_key", &new_key);
  m.def("cache_info", &info);
}

}  // namespace cuseq::python
