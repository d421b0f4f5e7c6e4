#include "python/arguments.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <sstream>
#include <string>

namespace cuseq::python {

namespace {

// The same rules and words as check_tensor in python/cuseq/_base/arguments.py.
[[noreturn]] void refuse_tensor(const at::Tensor& tensor, const char* name) {
  if (tensor.layout() == c10::kStrided && tensor.is_meta()) {
    throw py::value_error(std::string(name) + " must have values, got a tensor on meta");
  }
  std::ostringstream kind;
  if (tensor.is_nested()) {
    kind << "nested";
  } else if (tensor.is_quantized()) {
    kind << "quantized";
  } else {
    kind << tensor.layout();
  }
  throw py::type_error(std::string(name) + " must be a dense tensor, got a " + kind.str() + " one");
}

}  // namespace

std::string shown(py::handle value) {
  return py::module_::import("cuseq._base.arguments").attr("shown")(value).cast<std::string>();
}

const at::Tensor& tensor_argument(py::handle value, const char* name) {
  if (!THPVariable_Check(value.ptr())) {
    throw py::type_error(std::string(name) + " must be a tensor, got " +
                         Py_TYPE(value.ptr())->tp_name);
  }
  return THPVariable_Unpack(value.ptr());
}

const at::Tensor& dense_argument(py::handle value, const char* name) {
  const at::Tensor& tensor = tensor_argument(value, name);
  if (tensor.layout() != c10::kStrided || tensor.is_nested() || tensor.is_quantized() ||
      tensor.is_meta()) {
    refuse_tensor(tensor, name);
  }
  return tensor;
}

int64_t int_argument(py::handle value, const char* name) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();  // Ctrl-C
    PyErr_Clear();
    throw py::type_error(std::string(name) + " must be an int, got " + shown(value));
  }
  int overflow = 0;
  const int64_t result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) {
    throw py::value_error(std::string(name) + " must fit in int64, got " +
                          py::repr(number).cast<std::string>());
  }
  return result;
}

c10::Device device_argument(py::handle value, c10::Device fallback) {
  if (value.is_none()) return fallback;
  py::object made = py::reinterpret_borrow<py::object>(value);
  if (!THPDevice_Check(made.ptr())) {
    made = py::handle(reinterpret_cast<PyObject*>(&THPDeviceType))(made);
  }
  const c10::Device device = reinterpret_cast<THPDevice*>(made.ptr())->device;
  if (device.is_cpu()) return c10::kCPU;
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace cuseq::python
