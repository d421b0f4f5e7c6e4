#include <algorithm>
#include <numeric>

#include "ops/mask_rows.h"

namespace cuseq::cpu {
namespace {

template <typename T>
void map_rows(const MaskRowsArgs& args) {
  const PaddingMaskArgs& mask = args.mask;
  const auto* bits = static_cast<const T*>(mask.mask);
  std::fill_n(args.slots, args.total_tokens, -1);
  std::fill_n(args.is_pad, args.total_tokens, true);
  for (int64_t row = 0; row < mask.rows; ++row) {
    int64_t token = args.cu_seqlens[row];
    const int64_t end = args.cu_seqlens[row + 1];
    for (int64_t col = 0; col < mask.cols; ++col) {
      const int64_t slot = row * mask.cols + col;
      const T element = bits[row * mask.row_stride + col * mask.col_stride];
      const bool has_token = is_real_token(element, mask.kind) && token < end;
      args.tokens[slot] = has_token ? static_cast<int32_t>(token) : -1;
      if (!has_token) continue;
      args.slots[token] = static_cast<int32_t>(slot);
      args.is_pad[token++] = false;
    }
  }
  for (int64_t row = 0; row <= mask.rows; ++row) {
    const int64_t begin = args.cu_seqlens[row];
    const int64_t end = row < mask.rows ? args.cu_seqlens[row + 1] : args.total_tokens;
    std::iota(args.position_ids + begin, args.position_ids + end, 0);
    std::fill(args.seq_ids + begin, args.seq_ids + end, static_cast<int32_t>(row));
  }
}

}  // namespace

void mask_rows(const MaskRowsArgs& args) {
  switch (args.mask.element_size) {
    case 1:
      return map_rows<uint8_t>(args);
    case 2:
      return map_rows<uint16_t>(args);
    case 4:
      return map_rows<uint32_t>(args);
    default:
      return map_rows<uint64_t>(args);
  }
}

}  // namespace cuseq::cpu
