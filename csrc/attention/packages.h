#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cuseq/macros.h"

// Reports from Python about the packages "fa4" and "fa3", which launch their kernels in Python.
namespace cuseq::attention {

// Say why a package cannot be used. Empty if it can.
CUSEQ_API void set_missing(const std::string& name, const std::string& why);
CUSEQ_API std::string why_missing(const std::string& name);

// Say how the kernels of a package failed: "auto" passes it by from then on. Empty if they did not.
CUSEQ_API void set_failed(const std::string& name, const std::string& how);

// Return the widest heads, in head_dim after padding, that a package takes on a GPU of a compute
// capability such as 90.
CUSEQ_API int64_t most_head_dim(std::string_view name, int64_t sm);

// Say whether a package computes calls whose keys lie in another row, some of them for no query and
// some queries without keys, on CUDA or on the CPU.
CUSEQ_API void set_takes_two_rows(const std::string& name, bool on_cuda, bool takes);

}  // namespace cuseq::attention
