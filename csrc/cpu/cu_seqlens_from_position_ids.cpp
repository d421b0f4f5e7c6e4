#include <algorithm>

#include "cuseq/seqlens.h"
#include "ops/cu_seqlens_from_position_ids.h"

namespace cuseq::cpu {
namespace {

template <typename T>
void find_restarts(const PositionIdsArgs& args) {
  const T* position_ids = static_cast<const T*>(args.position_ids);
  int64_t count = 0;
  for (int64_t row = 0; row < args.rows; ++row) {
    const T* positions = position_ids + row * args.row_stride;
    for (int64_t col = 0; col < args.cols; ++col) {
      const bool starts =
          col == 0 || position_restarts(positions[(col - 1) * args.col_stride],
                                        positions[col * args.col_stride], args.is_plane);
      if (!starts) continue;
      if (count < args.max_seqs) {
        args.cu_seqlens[count] = static_cast<int32_t>(row * args.cols + col);
      }
      ++count;
    }
  }
  std::fill(args.cu_seqlens + std::min(count, args.max_seqs), args.cu_seqlens + args.max_seqs + 1,
            static_cast<int32_t>(args.rows * args.cols));
  *args.num_seqs = static_cast<int32_t>(count);
}

}  // namespace

void cu_seqlens_from_position_ids(const PositionIdsArgs& args) {
  args.is_int64 ? find_restarts<int64_t>(args) : find_restarts<int32_t>(args);
}

}  // namespace cuseq::cpu
