#include "ops/token_metadata.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "cuseq/ops.h"
#include "cuseq/seqlens.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/types.h"

namespace cuseq {
namespace {

Tensor per_token(const Tensor& lengths, int64_t total_tokens,
                 int32_t* TokenMetadataArgs::* output) {
  check_vector(lengths, "lengths");
  check_tokens(total_tokens);
  check_length_values(lengths, total_tokens);
  const Tensor offsets = cu_seqlens(lengths);
  Tensor out = at::empty({total_tokens}, int32_on(lengths));
  TokenMetadataArgs args;
  args.segments = segments_of(offsets, std::nullopt, total_tokens);
  args.*output = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(token_metadata, lengths, args);
  return out;
}

Tensor position_ids_kernel(const Tensor& lengths, int64_t total_tokens) {
  return per_token(lengths, total_tokens, &TokenMetadataArgs::position_ids);
}

Tensor seq_ids_kernel(const Tensor& lengths, int64_t total_tokens) {
  return per_token(lengths, total_tokens, &TokenMetadataArgs::seq_ids);
}

void run(const Tensor& offsets, const OptionalTensor& cu_seqlens_padded, const Tensor& positions,
         const Tensor& sequences, const Tensor& is_pad) {
  TokenMetadataArgs args;
  args.segments = segments_of(offsets, cu_seqlens_padded, positions.size(0));
  args.position_ids = positions.mutable_data_ptr<int32_t>();
  args.seq_ids = sequences.mutable_data_ptr<int32_t>();
  args.is_pad = is_pad.mutable_data_ptr<bool>();
  CUSEQ_RUN(token_metadata, offsets, args);
}

std::tuple<Tensor, Tensor, Tensor> token_metadata_kernel(const Tensor& offsets,
                                                         int64_t total_tokens,
                                                         const OptionalTensor& cu_seqlens_padded) {
  check_offsets(offsets);
  check_tokens(total_tokens);
  check_offset_values(offsets, total_tokens);
  check_padded_offsets(cu_seqlens_padded, offsets, total_tokens);
  const Tensor positions = at::empty({total_tokens}, int32_on(offsets));
  const Tensor sequences = at::empty_like(positions);
  const Tensor is_pad = at::empty_like(positions, positions.options().dtype(at::kBool));
  run(offsets, cu_seqlens_padded, positions, sequences, is_pad);
  return {positions, sequences, is_pad};
}

}  // namespace

void refill_token_metadata(const Tensor& cu_seqlens, const OptionalTensor& cu_seqlens_padded,
                           const Tensor& position_ids, const Tensor& seq_ids,
                           const Tensor& is_pad) {
  if (!cu_seqlens.is_meta()) run(cu_seqlens, cu_seqlens_padded, position_ids, seq_ids, is_pad);
  for (const Tensor& tensor : {position_ids, seq_ids, is_pad}) {
    torch::autograd::increment_version(tensor);
  }
}

Tensor position_ids(const Tensor& lengths, int64_t total_tokens) {
  static const auto op = find_op<Tensor(const Tensor&, c10::SymInt)>("cuseq::position_ids");
  return op.call(lengths, total_tokens);
}

Tensor seq_ids(const Tensor& lengths, int64_t total_tokens) {
  static const auto op = find_op<Tensor(const Tensor&, c10::SymInt)>("cuseq::seq_ids");
  return op.call(lengths, total_tokens);
}

CUSEQ_REGISTER(m) {
  m.impl("position_ids", TORCH_FN(position_ids_kernel));
  m.impl("seq_ids", TORCH_FN(seq_ids_kernel));
  m.impl("token_metadata", TORCH_FN(token_metadata_kernel));
}

}  // namespace cuseq
