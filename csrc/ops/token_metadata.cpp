#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cuseq/ops.h"
#include "cuseq/seqlens.h"
#include "ops/checks.h"
#include "ops/register.h"

namespace cuseq {
namespace {

at::Tensor per_token(const at::Tensor& lengths, int64_t total_tokens,
                     int32_t* TokenMetadataArgs::* output) {
  check_vector(lengths, "lengths");
  check_tokens(total_tokens);
  check_length_values(lengths, total_tokens);
  const at::Tensor offsets = cu_seqlens(lengths);
  at::Tensor out = at::empty({total_tokens}, int32_on(lengths));
  TokenMetadataArgs args;
  args.segments = segments_of(offsets, std::nullopt, total_tokens);
  args.*output = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(token_metadata, lengths, args);
  return out;
}

at::Tensor position_ids_kernel(const at::Tensor& lengths, int64_t total_tokens) {
  return per_token(lengths, total_tokens, &TokenMetadataArgs::position_ids);
}

at::Tensor seq_ids_kernel(const at::Tensor& lengths, int64_t total_tokens) {
  return per_token(lengths, total_tokens, &TokenMetadataArgs::seq_ids);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_metadata_kernel(
    const at::Tensor& offsets, int64_t total_tokens,
    const std::optional<at::Tensor>& cu_seqlens_padded) {
  check_offsets(offsets);
  check_tokens(total_tokens);
  check_offset_values(offsets, total_tokens);
  check_padded_offsets(cu_seqlens_padded, offsets, total_tokens);
  const at::Tensor positions = at::empty({total_tokens}, int32_on(offsets));
  const at::Tensor sequences = at::empty_like(positions);
  const at::Tensor is_pad = at::empty_like(positions, positions.options().dtype(at::kBool));
  TokenMetadataArgs args;
  args.segments = segments_of(offsets, cu_seqlens_padded, total_tokens);
  args.position_ids = positions.mutable_data_ptr<int32_t>();
  args.seq_ids = sequences.mutable_data_ptr<int32_t>();
  args.is_pad = is_pad.mutable_data_ptr<bool>();
  CUSEQ_RUN(token_metadata, offsets, args);
  return {positions, sequences, is_pad};
}

}  // namespace

at::Tensor position_ids(const at::Tensor& lengths, int64_t total_tokens) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cuseq::position_ids", "")
                             .typed<at::Tensor(const at::Tensor&, c10::SymInt)>();
  return op.call(lengths, total_tokens);
}

at::Tensor seq_ids(const at::Tensor& lengths, int64_t total_tokens) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cuseq::seq_ids", "")
                             .typed<at::Tensor(const at::Tensor&, c10::SymInt)>();
  return op.call(lengths, total_tokens);
}

CUSEQ_REGISTER(m) {
  m.impl("position_ids", TORCH_FN(position_ids_kernel));
  m.impl("seq_ids", TORCH_FN(seq_ids_kernel));
  m.impl("token_metadata", TORCH_FN(token_metadata_kernel));
}

}  // namespace cuseq
