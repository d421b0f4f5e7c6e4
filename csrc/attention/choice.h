#pragma once

#include <string>

#include "attention/backend.h"
#include "cuseq/macros.h"

// The choice of the backend that executes a call. It depends on the call alone, so the backward of
// a call makes the same choice as its forward.
namespace cuseq::attention {

struct Choice {
  const Backend* backend = nullptr;
  std::string reason;
};

// Return the backend for a call. Raise ValueError if call.backend names one that cannot take it.
const Backend& backend_of(const Call& call);

// Return the same backend, and why it was chosen.
CUSEQ_API Choice explained_choice(const Call& call);

// Say why a backend whose kernels come from Python is not there. Empty if it is.
CUSEQ_API void set_missing(const std::string& name, const std::string& why);
CUSEQ_API std::string why_missing(const std::string& name);

}  // namespace cuseq::attention
