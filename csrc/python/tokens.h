#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

// Sequences of token ids from Python: lists, NumPy arrays or tensors.
namespace cuseq::python {

namespace py = pybind11;

// One sequence of ints: its length, and its values on demand. Ints of tensors and arrays are copied
// from memory, those of lists are converted one by one.
class TokenSource {
 public:
  // `name` says in errors which argument it is.
  TokenSource(py::handle value, std::string name);

  int64_t length() const { return length_; }

  // Write the values to [to, to + length()).
  void copy_to(int64_t* to) const;

 private:
  enum class Kind { kInt64, kInt32, kObjects };

  py::object owner_;  // keeps the memory
  std::string name_;
  Kind kind_ = Kind::kObjects;
  const void* memory_ = nullptr;
  int64_t length_ = 0;
};

// Return the items of an iterable of sequences, with names such as "prompts[3]".
std::vector<TokenSource> token_sources(py::handle sequences, const std::string& name);

}  // namespace cuseq::python
