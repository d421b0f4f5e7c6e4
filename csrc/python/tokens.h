#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

// Sequences of token ids from Python: lists, NumPy arrays or tensors.
namespace cuseq::python {

namespace py = pybind11;

using Tokens = std::vector<int64_t>;

// Return an iterator over a list or another iterable but a string. Errors say what `name` must be.
py::iterator iterate(py::handle value, const std::string& name, const char* rule);

// Return a copy of one sequence of ints. Errors name it.
Tokens token_list(py::handle value, const std::string& name);

// Return the values of an iterable of sequences. Each sequence is copied when the iterable gives
// it: Python may change or free it before the next one. Errors name it, such as "prompts[3]".
std::vector<Tokens> token_lists(py::handle sequences, const std::string& name);

}  // namespace cuseq::python
