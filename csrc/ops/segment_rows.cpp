#include "ops/segment_rows.h"

#include <ATen/ops/empty.h>

#include "cuseq/ops.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/types.h"

namespace cuseq {
namespace {

std::tuple<Tensor, Tensor> segment_rows_kernel(const Tensor& cu_seqlens,
                                               const Tensor& cu_seqlens_padded,
                                               int64_t total_tokens) {
  check_offsets(cu_seqlens);
  check_tokens(total_tokens);
  check_offset_values(cu_seqlens, total_tokens);
  check_padded_offsets(cu_seqlens_padded, cu_seqlens, total_tokens);
  Tensor places = at::empty({total_tokens}, int32_on(cu_seqlens));
  Tensor ranks = at::empty({total_tokens}, int32_on(cu_seqlens));
  SegmentRowsArgs args;
  args.segments = segments_of(cu_seqlens, cu_seqlens_padded, total_tokens);
  args.places = places.mutable_data_ptr<int32_t>();
  args.ranks = ranks.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(segment_rows, cu_seqlens, args);
  return {places, ranks};
}

}  // namespace

std::tuple<Tensor, Tensor> segment_rows(const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded,
                                        int64_t total_tokens) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymInt)>(
          "cuseq::segment_rows");
  return op.call(cu_seqlens, cu_seqlens_padded, total_tokens);
}

CUSEQ_REGISTER(m) { m.impl("segment_rows", TORCH_FN(segment_rows_kernel)); }

}  // namespace cuseq
