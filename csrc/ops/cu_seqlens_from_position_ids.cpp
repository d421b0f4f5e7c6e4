#include "ops/cu_seqlens_from_position_ids.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "cuseq/seqlens.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/types.h"

namespace cuseq {
namespace {

// Return the rows to read, [rows, seqlen]: position_ids, or the plane that the caller chose.
Tensor rows_of(const Tensor& position_ids, std::optional<int64_t> plane) {
  check_integer(position_ids, "position_ids");
  if (position_ids.dim() == 3) {
    TORCH_CHECK_VALUE(
        plane.has_value(),
        "plane must choose a plane of position_ids of shape [planes, batch, seqlen] = ",
        position_ids.sizes(), ", got None");
    const int64_t planes = position_ids.size(0);
    TORCH_CHECK_VALUE(*plane >= 0 && *plane < planes, "plane must lie in [0, ", planes, "), got ",
                      *plane);
    return position_ids.select(0, *plane);
  }
  TORCH_CHECK_VALUE(!plane.has_value(),
                    "plane must be None for position_ids without planes, got plane = ",
                    plane.value_or(0), " and shape ", position_ids.sizes());
  TORCH_CHECK_VALUE(position_ids.dim() == 1 || position_ids.dim() == 2,
                    "position_ids must have shape [seqlen], [batch, seqlen] or "
                    "[planes, batch, seqlen], got ",
                    position_ids.sizes());
  return position_ids.dim() == 1 ? position_ids.unsqueeze(0) : position_ids;
}

std::tuple<Tensor, Tensor> cu_seqlens_from_position_ids_kernel(const Tensor& position_ids,
                                                               std::optional<int64_t> max_seqs,
                                                               std::optional<int64_t> plane) {
  const Tensor rows = rows_of(position_ids, plane);
  check_tokens(rows.numel());
  const int64_t capacity = max_seqs.value_or(rows.numel());
  check_max_seqs(capacity);
  Tensor offsets = at::empty({capacity + 1}, int32_on(rows));
  Tensor num_seqs = at::empty({1}, int32_on(rows));
  PositionIdsArgs args;
  args.position_ids = rows.const_data_ptr();
  args.is_int64 = rows.scalar_type() == at::kLong;
  args.is_plane = plane.has_value();
  args.rows = rows.size(0);
  args.cols = rows.size(1);
  args.row_stride = rows.stride(0);
  args.col_stride = rows.stride(1);
  args.max_seqs = capacity;
  args.cu_seqlens = offsets.mutable_data_ptr<int32_t>();
  args.num_seqs = num_seqs.mutable_data_ptr<int32_t>();
  Tensor tile_counts;
  if (rows.is_cuda()) {
    // At most 1,024 tiles, so that summing their counts costs far less than reading the tokens.
    constexpr int64_t kMinTile = 4096;
    constexpr int64_t kMaxTiles = 1024;
    args.tile_size = std::max(kMinTile, ceil_div(rows.numel(), kMaxTiles));
    tile_counts =
        at::empty({std::max<int64_t>(1, ceil_div(rows.numel(), args.tile_size))}, int32_on(rows));
    args.tile_counts = tile_counts.mutable_data_ptr<int32_t>();
  }
  CUSEQ_RUN(cu_seqlens_from_position_ids, rows, args);
  return {offsets, num_seqs};
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("cu_seqlens_from_position_ids", TORCH_FN(cu_seqlens_from_position_ids_kernel));
}

}  // namespace cuseq
