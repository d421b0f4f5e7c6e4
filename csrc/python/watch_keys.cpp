#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

#include "python/cache.h"

// The GIL guards the table of watched keys. This module does not declare itself safe without the
// GIL, so a free-threaded Python enables the GIL when it imports it.
namespace cuseq::python {
namespace {

// Weak references to the Python wrappers of live keys; the callback drops a key's entries when it
// dies. Guarded by the GIL. Never destroyed: at exit no interpreter is left to release them in.
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
    // The callback releases its own dead weak reference, after the key's entries.
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

}  // namespace

IdentityCache::Watcher key_watcher() { return {&watch, &unwatch}; }

}  // namespace cuseq::python
