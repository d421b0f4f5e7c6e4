#include "cuda/launch.cuh"
#include "ops/cp_rows.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    cp_rows_kernel(const __grid_constant__ CpRowsArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.deal.total_tokens) return;
  const int64_t own = args.deal.total_tokens / args.deal.cp_size;
  args.tokens[i] = static_cast<int32_t>(args.deal.token_of(i % own, i / own));
  args.places[i] = static_cast<int32_t>(args.deal.dealt(i));
}

}  // namespace

void cp_rows(const CpRowsArgs& args, Stream stream) {
  if (args.deal.total_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(args.deal.total_tokens, kThreads));
  cp_rows_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace cuseq::cuda
