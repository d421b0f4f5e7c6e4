#pragma once

#include <string>

#include "attention/backend.h"
#include "cuseq/macros.h"

// The choice of the backend that executes a call. It depends on the call alone, so the backward of
// a call makes the same choice as its forward, unless a package failed in between.
namespace cuseq::attention {

// Return the backend for a call, and write to `reason`, if given, why it was chosen. Raise
// ValueError if call.backend names one that cannot take it.
CUSEQ_API const Backend& backend_of(const Call& call, std::string* reason = nullptr);

}  // namespace cuseq::attention
