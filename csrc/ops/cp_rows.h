#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/kernel.h"

namespace cuseq {

struct CpRowsArgs {
  ContextParallel deal;
  int32_t* tokens = nullptr;  // [total_tokens], token at each place of the dealt row
  int32_t* places = nullptr;  // [total_tokens], place of each token in the dealt row
};

namespace cpu {
void cp_rows(const CpRowsArgs& args);
}  // namespace cpu

namespace cuda {
void cp_rows(const CpRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
