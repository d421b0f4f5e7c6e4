#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "python/bindings.h"

namespace cuseq::python {
namespace {

// Call visit(item) for each item of a list until it returns false. Return whether it never did. A
// gradient that is freed may run Python, so the list may change between two items.
template <typename Visit>
bool visit_items(py::handle list, const Visit& visit) {
  TORCH_CHECK_TYPE(PyList_Check(list.ptr()), "groups must be a list of lists of tensors, got ",
                   Py_TYPE(list.ptr())->tp_name);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
    const auto item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(list.ptr(), i));
    if (!visit(item)) return false;
  }
  return true;
}

// The same for the parameters in an optimizer's groups, a list of lists of tensors.
template <typename Visit>
bool visit_all(py::handle groups, const Visit& visit) {
  return visit_items(groups, [&](py::handle group) {
    return visit_items(group, [&](py::handle parameter) {
      TORCH_CHECK_TYPE(THPVariable_Check(parameter.ptr()), "groups must hold tensors, got ",
                       Py_TYPE(parameter.ptr())->tp_name);
      return visit(parameter);
    });
  });
}

const at::Tensor& unpacked(py::handle parameter) { return THPVariable_Unpack(parameter.ptr()); }

// Where the values of a parameter are: a DTensor has none itself, but its part on this rank.
const void* place_of(py::handle parameter) {
  constexpr const char* kLocal = "_local_tensor";
  // Most are of class Parameter; an attribute that is not there costs an exception.
  if (THPVariable_CheckTypeExact(Py_TYPE(parameter.ptr())) || !py::hasattr(parameter, kLocal)) {
    return unpacked(parameter).const_data_ptr();
  }
  const py::object local = parameter.attr(kLocal);
  return unpacked(local).const_data_ptr();
}

// The parameters that a captured step updates and the gradients that its replays write. A loop over
// hundreds of parameters in Python takes longer than the launch of the graph.
class CapturedParameters {
 public:
  explicit CapturedParameters(const py::list& groups) {
    visit_all(groups, [&](py::handle item) {
      const at::Tensor& parameter = unpacked(item);
      known_.push_back({place_of(item), parameter.requires_grad(), parameter.grad()});
      return true;
    });
  }

  // Return whether parameters are where they were, and trained if they were.
  bool are(const py::list& groups) const {
    size_t next = 0;
    const bool same = visit_all(groups, [&](py::handle item) {
      if (next == known_.size()) return false;
      const Known& known = known_[next++];
      return place_of(item) == known.data && unpacked(item).requires_grad() == known.requires_grad;
    });
    return same && next == known_.size();
  }

  // Give parameters the gradients that a replay writes. They must be those of the capture.
  void set_gradients(const py::list& groups) const {
    size_t next = 0;
    visit_all(groups, [&](py::handle item) {
      unpacked(item).mutable_grad() = known_.at(next++).gradient;
      return true;
    });
  }

 private:
  struct Known {
    const void* data;
    bool requires_grad;
    at::Tensor gradient;  // undefined for a parameter without one
  };
  std::vector<Known> known_;
};

}  // namespace

void bind_parameters(py::module_& m) {
  py::class_<CapturedParameters>(m, "CapturedParameters")
      .def(py::init<const py::list&>())
      .def("are", &CapturedParameters::are)
      .def("set_gradients", &CapturedParameters::set_gradients);
}

}  // namespace cuseq::python
