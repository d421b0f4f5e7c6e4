#pragma once

#include "attention/call.h"

// What answers a call. A backend is one file that registers itself here:
//
//   static const RegisterBackend registered({"flash", /*preference=*/100, takes, forward,
//   backward});
namespace cuseq::attention {

struct Backend {
  const char* name;
  int preference;  // of the backends that take a call the largest one answers it
  bool (*takes)(const Call& call);
  Output (*forward)(const Call& call);
  Gradients (*backward)(const Call& call, const Outer& outer);
  // Warns, once a process, of what it costs that no preferred backend takes the call; may be null.
  void (*warn)(const Call& call) = nullptr;
};

struct RegisterBackend {
  explicit RegisterBackend(const Backend& backend);
};

}  // namespace cuseq::attention
