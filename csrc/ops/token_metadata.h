#pragma once

#include <cstdint>

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

}  // namespace cuseq
