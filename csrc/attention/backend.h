#pragma once

#include "attention/call.h"

// A backend executes attention calls. It is one file that registers itself here:
//
//   static const RegisterBackend registered({"flash", /*preference=*/100, takes, forward,
//   backward});
namespace cuseq::attention {

struct Backend {
  const char* name;
  int preference;  // among backends that take a call, the largest wins
  bool (*takes)(const Call& call);
  Output (*forward)(const Call& call);
  Gradients (*backward)(const Call& call, const Outer& outer);
  // Warn once per process about the cost of falling back to this backend; may be null.
  void (*warn)(const Call& call) = nullptr;
};

struct RegisterBackend {
  explicit RegisterBackend(const Backend& backend);
};

}  // namespace cuseq::attention
