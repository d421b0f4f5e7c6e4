#pragma once

#include "attention/call.h"

// What a layout asks for, as calls. A composition is one file that registers itself here, and knows
// the layout but no backend:
//
//   static const RegisterComposition registered({"padded", fits, forward, backward});
namespace cuseq::attention {

// A layout's row with the tensors that lie in it, checked: the call that would attend to the whole
// row, and what else the layout says.
struct Row {
  Call call;
  OptionalTensor cu_seqlens_padded;  // where segments start, if longer than their sequences
};

struct Composition {
  const char* name;
  bool (*fits)(const Row& row);  // true where the layout asks for it
  Output (*forward)(const Row& row);
  Gradients (*backward)(const Row& row, const Outer& outer);
};

struct RegisterComposition {
  explicit RegisterComposition(const Composition& composition);
};

// Attend to a row by the composition that its layout asks for, or in one call.
Output attend(const Row& row);
Gradients attend_backward(const Row& row, const Outer& outer);

}  // namespace cuseq::attention
