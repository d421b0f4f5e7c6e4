#include "ops/mask_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lengths_from_padding_mask.h"
#include "ops/types.h"

namespace cuseq {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mask_rows_kernel(const Tensor& mask,
                                                                    const Tensor& cu_seqlens,
                                                                    int64_t total_tokens,
                                                                    c10::string_view kind) {
  MaskRowsArgs args;
  args.mask = padding_mask_args(mask, kind);
  check_offsets(cu_seqlens);
  check_tokens(total_tokens);
  check_offset_values(cu_seqlens, total_tokens);
  TORCH_CHECK_VALUE(cu_seqlens.size(0) > mask.size(0),
                    "cu_seqlens must have at least batch + 1 = ", mask.size(0) + 1,
                    " entries, got ", cu_seqlens.size(0));
  TORCH_CHECK_VALUE(cu_seqlens.device() == mask.device(),
                    "cu_seqlens must lie where mask does, on ", mask.device(), ", got ",
                    cu_seqlens.device());
  const Tensor slots = at::empty({total_tokens}, int32_on(mask));
  const Tensor tokens = at::empty({mask.size(0), mask.size(1)}, int32_on(mask));
  const Tensor position_ids = at::empty_like(slots);
  const Tensor seq_ids = at::empty_like(slots);
  const Tensor is_pad = at::empty_like(slots, slots.options().dtype(at::kBool));
  args.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
  args.total_tokens = total_tokens;
  args.slots = slots.mutable_data_ptr<int32_t>();
  args.tokens = tokens.mutable_data_ptr<int32_t>();
  args.position_ids = position_ids.mutable_data_ptr<int32_t>();
  args.seq_ids = seq_ids.mutable_data_ptr<int32_t>();
  args.is_pad = is_pad.mutable_data_ptr<bool>();
  CUSEQ_RUN(mask_rows, mask, args);
  return {slots, tokens, position_ids, seq_ids, is_pad};
}

}  // namespace

CUSEQ_REGISTER(m) { m.impl("mask_rows", TORCH_FN(mask_rows_kernel)); }

}  // namespace cuseq
