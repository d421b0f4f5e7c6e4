#pragma once

#include <c10/util/SmallVector.h>

#include <array>
#include <string>

#include "attention/backend.h"
#include "attention/measured.h"
#include "cuseq/macros.h"

// The choice of the backend that executes a call. It depends on the call, the table of
// measurements, deterministic mode and whether a graph is being captured. None of them changes
// between the forward and the backward of a call, which so make the same choice, unless a package
// failed in between.
namespace cuseq::attention {

// The names that a call may give. Python takes them from here; "flex" runs there.
inline constexpr std::array kBackendNames = {"auto", "flash", "cudnn",     "fa4",
                                             "fa3",  "flex",  "efficient", "segments"};

// A backend that takes the call.
struct Candidate {
  const Backend* backend;
  double us;  // where something like the call was measured; infinity if it was not
};

struct Choice {
  c10::SmallVector<Candidate, 8> candidates;  // at least one, the best first
  const Measured* row = nullptr;              // what their order follows; null: a rule, or a name
};

// Return the backends that take a call. Raise ValueError if call.backend names one that cannot.
CUSEQ_API Choice choose(const Call& call);

// Return why the first candidate was chosen, and why other backends refuse the call.
CUSEQ_API std::string reason_of(const Call& call, const Choice& choice);

}  // namespace cuseq::attention
