#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

// The parts of the module _C, each in its own file.
namespace cuseq::python {

namespace py = pybind11;

using OptionalTensor = std::optional<at::Tensor>;
using Released = py::call_guard<py::gil_scoped_release>;

void bind_attention(py::module_& m);  // the choice of a backend
void bind_cache(py::module_& m);      // the identity cache, with hits that skip the dispatcher
void bind_conv(py::module_& m);       // the convolution, with unboxed arguments
void bind_layout(py::module_& m);  // host copies of device lengths, and the checks that read them
void bind_parameters(py::module_& m);  // what a captured step updates
void bind_planning(py::module_& m);  // which samples share a row, and which rank holds which tokens
void bind_rope(py::module_& m);      // the rotations, with unboxed arguments
void bind_trees(py::module_& m);     // which tokens of a row follow which

}  // namespace cuseq::python
