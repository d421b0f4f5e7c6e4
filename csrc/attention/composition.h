#pragma once

#include "attention/call.h"
#include "attention/rank_share.h"
#include "attention/tree_calls.h"

// A composition turns a row with its layout into attention calls. It is one file that registers
// itself here; it knows the layout but no backend:
//
//   static const RegisterComposition registered({"padded", fits, forward, backward});
namespace cuseq::attention {

// The checked tensors and layout of a row: the call that would attend over the whole row, and the
// rest of what the layout says.
struct Row {
  Call call;
  OptionalTensor cu_seqlens_padded;  // segment starts, if segments are padded
  std::optional<TreeCalls> tree;     // what tokens see besides their own node, if it is a tree
  std::optional<RankShare> share;    // of a plan, if the row is a rank's part of one
  // With a share: rows of keys and values that the forward writes and the backward reads, if the
  // share keeps far rows. [tokens / kTokensPerKeptRow, key_heads * (head_dim + value_dim)]
  OptionalTensor far_rows;
};

struct Composition {
  const char* name;
  bool (*fits)(const Row& row);  // whether the row's layout needs it
  Output (*forward)(const Row& row);
  Gradients (*backward)(const Row& row, const Outer& outer);
};

struct RegisterComposition {
  explicit RegisterComposition(const Composition& composition);
};

// Attend over a row through the composition that fits its layout, or in one call if none does.
Output attend(const Row& row);
Gradients attend_backward(const Row& row, const Outer& outer);

}  // namespace cuseq::attention
