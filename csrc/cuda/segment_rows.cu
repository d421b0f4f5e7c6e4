#include "cuda/launch.cuh"
#include "ops/segment_rows.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    segment_rows_kernel(const __grid_constant__ SegmentRowsArgs args) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= args.segments.total_tokens) return;
  args.places[token] = static_cast<int32_t>(args.segments.place_of(token));
  args.ranks[token] = static_cast<int32_t>(args.segments.rank_of(token));
}

}  // namespace

void segment_rows(const SegmentRowsArgs& args, Stream stream) {
  if (args.segments.total_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(args.segments.total_tokens, kThreads));
  segment_rows_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace cuseq::cuda
