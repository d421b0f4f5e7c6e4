#include "python/tokens.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "python/arguments.h"

namespace cuseq::python {
namespace {

// Raise TypeError, from an error that Python raised if there is one; an interrupt stays what it is.
[[noreturn]] void refuse(py::handle value, const std::string& name, const char* rule) {
  const bool has_cause = PyErr_Occurred() != nullptr;
  if (has_cause && PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
  const std::string must = name + " must be " + rule + ", got ";
  if (!has_cause) throw py::type_error(must + shown(value));
  py::error_already_set cause;
  py::raise_from(cause, PyExc_TypeError, (must + shown(value)).c_str());
  throw py::error_already_set();
}

constexpr const char* kOneSequence = "a list, an array or a tensor of ints";

Tokens of_tensor(py::handle value, const std::string& name) {
  const at::Tensor& tensor = dense_argument(value, name.c_str());
  const bool is_int = tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
  TORCH_CHECK_TYPE(is_int, name, " must be int32 or int64, got ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.dim() == 1, name, " must have one dimension, got ", tensor.sizes());
  TORCH_CHECK_VALUE(tensor.is_cpu(), name,
                    " must lie on the CPU, since a tree is built there, got ", tensor.device());
  check_memory(tensor, name.c_str());
  Tokens values(tensor.numel());
  at::from_blob(values.data(), {tensor.numel()}, at::kLong).copy_(tensor);
  return values;
}

template <typename Int>
Tokens of_memory(const py::buffer_info& info) {
  const auto* values = static_cast<const Int*>(info.ptr);
  return {values, values + info.size};
}

// Return the ints in the memory of an array; nothing for another object, or other memory.
std::optional<Tokens> of_array(py::handle value) {
  if (PyObject_CheckBuffer(value.ptr()) == 0) return std::nullopt;
  try {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(value).request();
    const bool is_signed = info.format == "l" || info.format == "q" || info.format == "i";
    if (!is_signed || info.ndim != 1 || info.strides[0] != info.itemsize) return std::nullopt;
    if (info.itemsize == 8) return of_memory<int64_t>(info);
    if (info.itemsize == 4) return of_memory<int32_t>(info);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // an interrupt
  }
  return std::nullopt;
}

Tokens of_items(py::handle value, const std::string& name) {
  // A tuple that only this function has: an item's __index__ may change a list.
  const auto items = py::reinterpret_steal<py::object>(
      PyUnicode_Check(value.ptr()) ? nullptr : PySequence_Tuple(value.ptr()));
  if (!items) {
    refuse(value, name, kOneSequence);
  }
  Tokens values(PyTuple_GET_SIZE(items.ptr()));
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    if (PyLong_CheckExact(item)) {
      values[i] = PyLong_AsLongLong(item);
      if (values[i] != -1 || PyErr_Occurred() == nullptr) continue;
      PyErr_Clear();
    }
    values[i] = int_argument(item, (name + "[" + std::to_string(i) + "]").c_str());
  }
  return values;
}

}  // namespace

Tokens token_list(py::handle value, const std::string& name) {
  if (THPVariable_Check(value.ptr())) return of_tensor(value, name);
  if (PyBytes_Check(value.ptr())) {
    refuse(value, name, kOneSequence);
  }
  auto values = of_array(value);
  return values.has_value() ? *std::move(values) : of_items(value, name);
}

py::iterator iterate(py::handle value, const std::string& name, const char* rule) {
  PyObject* items = PyUnicode_Check(value.ptr()) ? nullptr : PyObject_GetIter(value.ptr());
  if (items == nullptr) refuse(value, name, rule);
  return py::reinterpret_steal<py::iterator>(items);
}

std::vector<Tokens> token_lists(py::handle sequences, const std::string& name) {
  std::vector<Tokens> found;
  auto items = iterate(sequences, name, "a list of token sequences");
  for (; items != py::iterator::sentinel(); ++items) {
    found.push_back(token_list(*items, name + "[" + std::to_string(found.size()) + "]"));
  }
  return found;
}

}  // namespace cuseq::python
