#pragma once

#include <string>

#include "cuseq/macros.h"

// Reports from Python about the packages "fa4" and "fa3", which launch their kernels in Python.
namespace cuseq::attention {

// Say why a package cannot be used. Empty if it can.
CUSEQ_API void set_missing(const std::string& name, const std::string& why);
CUSEQ_API std::string why_missing(const std::string& name);

// Say how the kernels of a package failed: "auto" passes it by from then on. Empty if they did not.
CUSEQ_API void set_failed(const std::string& name, const std::string& how);

}  // namespace cuseq::attention
