#pragma once

#include <string>
#include <vector>

#include "attention/call.h"

// A backend executes attention calls. It is one file that registers itself here:
//
//   static const RegisterBackend registered({"flash", /*preference=*/100, obstacle, forward,
//   backward});
namespace cuseq::attention {

struct Backend {
  const char* name;
  int preference;  // among backends that nobody measured, the largest wins
  // Return an empty string if the backend takes the call, else why not and what to do instead.
  std::string (*obstacle)(const Call& call);
  Output (*forward)(const Call& call);
  Gradients (*backward)(const Call& call, const Outer& outer);
  // Warn once per process about the cost of falling back to this backend; may be null.
  void (*warn)(const Call& call) = nullptr;
};

struct RegisterBackend {
  explicit RegisterBackend(const Backend& backend);
};

// Return every backend of this build, sorted by descending preference.
const std::vector<Backend>& backends();

}  // namespace cuseq::attention
