#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "kernels/kernels.h"

namespace cuseq {

// The mask [batch, seqlen] of a padded batch as the kernels read it, checked. `kind` says which of
// its elements are real tokens: "nonzero", "zero" or, of an additive mask, "additive": those that
// are not negative.
PaddingMaskArgs padding_mask_args(const at::Tensor& mask, std::string_view kind);

}  // namespace cuseq
