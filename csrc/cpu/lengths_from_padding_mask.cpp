#include "ops/lengths_from_padding_mask.h"

namespace cuseq::cpu {
namespace {

template <typename T>
void count(const PaddingMaskArgs& args) {
  const T* mask = static_cast<const T*>(args.mask);
  for (int64_t row = 0; row < args.rows; ++row) {
    int32_t real = 0;
    for (int64_t col = 0; col < args.cols; ++col) {
      real += is_real_token(mask[row * args.row_stride + col * args.col_stride], args.kind);
    }
    args.lengths[row] = real;
  }
}

}  // namespace

void lengths_from_padding_mask(const PaddingMaskArgs& args) {
  switch (args.element_size) {
    case 1:
      return count<uint8_t>(args);
    case 2:
      return count<uint16_t>(args);
    case 4:
      return count<uint32_t>(args);
    default:
      return count<uint64_t>(args);
  }
}

}  // namespace cuseq::cpu
