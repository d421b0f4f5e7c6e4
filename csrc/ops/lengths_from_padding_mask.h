#pragma once

#include <cstdint>
#include <string_view>

#include "cuseq/macros.h"
#include "ops/kernel.h"

namespace at {
class Tensor;
}

namespace cuseq {

// The elements of a mask that mark real tokens.
enum class MaskKind : uint8_t {
  kNonZeroIsReal,
  kZeroIsReal,
  kNegativeIsHidden,  // additive, floating point
};

// Return whether an element marks a real token. `bits` are its bits as an unsigned integer.
template <typename T>
CUSEQ_HOST_DEVICE bool is_real_token(T bits, MaskKind kind) {
  if (kind == MaskKind::kNonZeroIsReal) return bits != 0;
  if (kind == MaskKind::kZeroIsReal) return bits == 0;
  constexpr T kMinusZero = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  return bits <= kMinusZero;
}

struct PaddingMaskArgs {
  const void* mask = nullptr;  // [rows, cols]
  MaskKind kind = MaskKind::kNonZeroIsReal;
  int64_t element_size = 1;  // bytes: 1, 2, 4 or 8
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 1;
  int32_t* lengths = nullptr;  // [rows]
};

// Check the mask [batch, seqlen] of a padded batch and describe it for the kernels. `kind` says
// which elements mark real tokens: "nonzero", "zero" or, for an additive mask, "additive": those
// that are not negative.
PaddingMaskArgs padding_mask_args(const at::Tensor& mask, std::string_view kind);

namespace cpu {
void lengths_from_padding_mask(const PaddingMaskArgs& args);
}  // namespace cpu

namespace cuda {
void lengths_from_padding_mask(const PaddingMaskArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
