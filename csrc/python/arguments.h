#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>

// Arguments as Python gives them. pybind11 would list every signature in its error; these name the
// argument instead, and cost less.
namespace cuseq::python {

namespace py = pybind11;

const at::Tensor& tensor_argument(py::handle value, const char* name);
int64_t int_argument(py::handle value, const char* name);

// A torch.device or what makes one, with its index; the fallback for None.
c10::Device device_argument(py::handle value, c10::Device fallback);

}  // namespace cuseq::python
