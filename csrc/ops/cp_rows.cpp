#include "ops/cp_rows.h"

#include <ATen/ops/empty.h>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/types.h"

namespace cuseq {
namespace {

// Check that lengths and tail divide into `parts`. Only values on the host are checked here; for
// those on a device, see the layout's host_meta.
void check_parts(const Tensor& cu_seqlens, int64_t total_tokens, int64_t parts) {
  if (!values_can_be_read(cu_seqlens)) return;
  const Tensor host = cu_seqlens.cpu();
  const auto* offsets = host.const_data_ptr<int32_t>();
  const int64_t n_seqs = host.size(0) - 1;
  for (int64_t i = 0; i < n_seqs; ++i) {
    TORCH_CHECK_VALUE((offsets[i + 1] - offsets[i]) % parts == 0, "lengths must be multiples of ",
                      parts, " to be dealt to the ranks, got lengths[", i,
                      "] = ", offsets[i + 1] - offsets[i]);
  }
  TORCH_CHECK_VALUE((total_tokens - offsets[n_seqs]) % parts == 0,
                    "the tail must be a multiple of ", parts, " to be dealt to the ranks, got ",
                    total_tokens - offsets[n_seqs]);
}

std::tuple<Tensor, Tensor> cp_rows_kernel(const Tensor& cu_seqlens, int64_t total_tokens,
                                          int64_t cp_size) {
  check_offsets(cu_seqlens);
  check_tokens(total_tokens);
  check_offset_values(cu_seqlens, total_tokens);
  TORCH_CHECK_VALUE(cp_size >= 1 && total_tokens % cp_size == 0,
                    "cp_size must be at least 1 and divide total_tokens = ", total_tokens, ", got ",
                    cp_size);
  check_parts(cu_seqlens, total_tokens, 2 * cp_size);
  Tensor tokens = at::empty({total_tokens}, int32_on(cu_seqlens));
  Tensor places = at::empty({total_tokens}, int32_on(cu_seqlens));
  if (total_tokens == 0) return {tokens, places};
  CpRowsArgs args;
  args.deal.segments = {cu_seqlens.const_data_ptr<int32_t>(), cu_seqlens.size(0) - 1};
  args.deal.total_tokens = total_tokens;
  args.deal.cp_size = cp_size;
  args.tokens = tokens.mutable_data_ptr<int32_t>();
  args.places = places.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(cp_rows, cu_seqlens, args);
  return {tokens, places};
}

}  // namespace

CUSEQ_REGISTER(m) { m.impl("cp_rows", TORCH_FN(cp_rows_kernel)); }

}  // namespace cuseq
