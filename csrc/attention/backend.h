#pragma once

#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/call.h"

// A backend executes attention calls. It is one file that registers itself, under a name that
// kBackendNames in choice.h must have:
//
//   namespace cuseq::attention {
//   namespace {
//   bool takes(const Call& call, std::string* why) { ... }
//   std::optional<Output> forward(const Call& call) { ... }
//   std::optional<Gradients> backward(const Call& call, const Outer& outer) { ... }
//   const RegisterBackend registered({"flash", /*preference=*/100, takes, forward, backward});
//   }  // namespace
//   }  // namespace cuseq::attention
namespace cuseq::attention {

struct Backend {
  const char* name;
  int preference;  // among backends without a measurement, the largest wins
  // Return whether the backend takes the call. If not and `why` is given, write to it why not and
  // what to do instead. Every eager call asks without `why`: then nothing may be allocated.
  bool (*takes)(const Call& call, std::string* why);
  // Return nothing if the backend refuses the call only when it runs, as a package does whose
  // kernel cannot be compiled. It may not refuse a call that names it.
  std::optional<Output> (*forward)(const Call& call);
  std::optional<Gradients> (*backward)(const Call& call, const Outer& outer);
  // Warn once per process about the cost of falling back to this backend; may be null.
  void (*warn)(const Call& call) = nullptr;
  // Return the microseconds that a call takes beyond what was measured of calls like it; may be
  // null.
  double (*extra_us)(const Call& call) = nullptr;
};

// Return false for `takes`, and write the reason if it is wanted.
template <typename... Parts>
bool refuse(std::string* why, const Parts&... parts) {
  if (why != nullptr) *why = c10::str(parts...);
  return false;
}

struct RegisterBackend {
  explicit RegisterBackend(const Backend& backend);
};

// Return every backend of this build, sorted by descending preference.
const std::vector<Backend>& backends();

}  // namespace cuseq::attention
