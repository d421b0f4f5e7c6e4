#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cuseq/macros.h"

// The packages "fa4" and "fa3", which launch their kernels in Python.
namespace cuseq::attention {

// Say why a package cannot be used, once Python has tried to load it. Empty if it can be used.
CUSEQ_API void set_missing(const std::string& name, const std::string& why);
CUSEQ_API std::string why_missing(const std::string& name);

// Say that kernels of a package were registered, which have not failed, and whether they compute
// calls whose keys lie in another row, some of them for no query and some queries without keys.
CUSEQ_API void set_registered(const std::string& name, bool on_cuda, bool takes_two_rows);

// Return how a kernel of a package failed in a call of "auto", which passes the package by since.
// Empty if none did, and for every other backend.
CUSEQ_API std::string why_failed(const std::string& name);

// Return the widest heads, in head_dim after padding, that a package takes on a GPU of a compute
// capability such as 90.
CUSEQ_API int64_t most_head_dim(std::string_view name, int64_t sm);

}  // namespace cuseq::attention
