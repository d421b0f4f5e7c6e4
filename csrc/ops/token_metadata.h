#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cuseq/macros.h"
#include "cuseq/seqlens.h"
#include "ops/kernel.h"

namespace cuseq {

struct TokenMetadataArgs {
  Segments segments{};
  // [total_tokens] each, or null
  int32_t* position_ids = nullptr;
  int32_t* seq_ids = nullptr;
  bool* is_pad = nullptr;
};

namespace cpu {
void token_metadata(const TokenMetadataArgs& args);
}  // namespace cpu

namespace cuda {
void token_metadata(const TokenMetadataArgs& args, Stream stream);
}  // namespace cuda

// Compute what the op token_metadata returns into tensors that it returned for another row.
CUSEQ_API void refill_token_metadata(const at::Tensor& cu_seqlens,
                                     const std::optional<at::Tensor>& cu_seqlens_padded,
                                     const at::Tensor& position_ids, const at::Tensor& seq_ids,
                                     const at::Tensor& is_pad);

}  // namespace cuseq
