#include "python/tokens.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/dtype_name.h"
#include "python/arguments.h"

namespace cuseq::python {
namespace {

std::string shown(py::handle value) {
  auto text = py::repr(value).cast<std::string>();
  return text.size() <= 200 ? text : text.substr(0, 200) + "...";
}

}  // namespace

TokenSource::TokenSource(py::handle value, std::string name) : name_(std::move(name)) {
  if (THPVariable_Check(value.ptr())) {
    const at::Tensor& tensor = dense_argument(value, name_.c_str());
    const bool is_int = tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
    TORCH_CHECK_TYPE(is_int, name_, " must be int32 or int64, got ",
                     dtype_name(tensor.scalar_type()));
    TORCH_CHECK_VALUE(tensor.dim() == 1, name_, " must have one dimension, got ", tensor.sizes());
    TORCH_CHECK_VALUE(tensor.is_cpu(), name_,
                      " must lie on the CPU, since a tree is built there, "
                      "got ",
                      tensor.device());
    const at::Tensor own = tensor.resolve_neg().contiguous();
    owner_ = py::cast(own);
    memory_ = own.const_data_ptr();
    kind_ = own.scalar_type() == at::kLong ? Kind::kInt64 : Kind::kInt32;
    length_ = own.numel();
    return;
  }
  if (PyObject_CheckBuffer(value.ptr()) != 0 && !PyBytes_Check(value.ptr())) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(value).request();
    const bool is_signed = info.format == "l" || info.format == "q" || info.format == "i";
    const bool fits = is_signed && (info.itemsize == 8 || info.itemsize == 4);
    if (fits && info.ndim == 1 && info.strides[0] == info.itemsize) {
      owner_ = py::reinterpret_borrow<py::object>(value);
      memory_ = info.ptr;
      kind_ = info.itemsize == 8 ? Kind::kInt64 : Kind::kInt32;
      length_ = info.size;
      return;
    }
  }
  PyObject* items = PySequence_Fast(value.ptr(), "");
  if (items == nullptr || PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr())) {
    PyErr_Clear();
    throw py::type_error(name_ + " must be a list, an array or a tensor of ints, got " +
                         shown(value));
  }
  owner_ = py::reinterpret_steal<py::object>(items);
  length_ = PySequence_Fast_GET_SIZE(items);
}

void TokenSource::copy_to(int64_t* to) const {
  if (kind_ == Kind::kInt64) {
    if (length_ > 0) std::memcpy(to, memory_, length_ * sizeof(int64_t));
    return;
  }
  if (kind_ == Kind::kInt32) {
    const auto* values = static_cast<const int32_t*>(memory_);
    std::copy(values, values + length_, to);
    return;
  }
  PyObject** items = PySequence_Fast_ITEMS(owner_.ptr());
  for (int64_t i = 0; i < length_; ++i) {
    PyObject* item = items[i];
    if (PyLong_CheckExact(item)) {
      to[i] = PyLong_AsLongLong(item);
      if (to[i] != -1 || PyErr_Occurred() == nullptr) continue;
      PyErr_Clear();
    }
    const std::string name = name_ + "[" + std::to_string(i) + "]";
    to[i] = int_argument(item, name.c_str());
  }
}

std::vector<TokenSource> token_sources(py::handle sequences, const std::string& name) {
  std::vector<TokenSource> found;
  const bool iterable =
      py::isinstance<py::iterable>(sequences) && !PyUnicode_Check(sequences.ptr());
  if (!iterable) {
    throw py::type_error(name + " must be a list of token sequences, got " + shown(sequences));
  }
  for (const py::handle item : py::reinterpret_borrow<py::iterable>(sequences)) {
    found.emplace_back(item, name + "[" + std::to_string(found.size()) + "]");
  }
  return found;
}

}  // namespace cuseq::python
