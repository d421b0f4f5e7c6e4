#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>

// Conversion of Python arguments. Their errors name the argument, where pybind11 would list every
// signature, and they are faster.
namespace cuseq::python {

namespace py = pybind11;

// Return the text of a value for an error message, as Python's `shown` does.
std::string shown(py::handle value);

const at::Tensor& tensor_argument(py::handle value, const char* name);

// Return a dense tensor with values; refuse sparse, nested, quantized and meta tensors.
const at::Tensor& dense_argument(py::handle value, const char* name);
int64_t int_argument(py::handle value, const char* name);

// Return a torch.device with its index, from a device or anything that torch.device accepts; return
// the fallback for None.
c10::Device device_argument(py::handle value, c10::Device fallback);

}  // namespace cuseq::python
