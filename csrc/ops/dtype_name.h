#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace cuseq {

// Return the name of a dtype in Python, such as "torch.float32", for messages: C++ prints "Float".
inline std::string dtype_name(c10::ScalarType dtype) {
  // A std::string in torch 2.11, a std::string_view in torch 2.13 and later.
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace cuseq
