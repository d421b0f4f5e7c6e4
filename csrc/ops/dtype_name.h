#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace cuseq {

// Return the name of a dtype in Python, such as "torch.float32", for messages: C++ prints "Float".
inline std::string dtype_name(c10::ScalarType dtype) {
  return "torch." + c10::getDtypeNames(dtype).first;
}

}  // namespace cuseq
