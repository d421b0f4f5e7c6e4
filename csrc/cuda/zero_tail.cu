#include "cuda/launch.cuh"
#include "ops/zero_tail.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void store_zero(char* to, int64_t unit) {
  switch (unit) {
    case 16:
      *reinterpret_cast<uint4*>(to) = uint4{};
      break;
    case 8:
      *reinterpret_cast<uint2*>(to) = uint2{};
      break;
    case 4:
      *reinterpret_cast<uint32_t*>(to) = 0;
      break;
    case 2:
      *reinterpret_cast<uint16_t*>(to) = 0;
      break;
    default:
      *to = 0;
  }
}

// A row of blocks for each tensor. Only the device knows how long the tail is, so the grid does not
// depend on it; most tails are empty or short.
__global__ void __launch_bounds__(kThreads)
    zero_tail_kernel(const __grid_constant__ ZeroTailArgs args) {
  const RowBytes& rows = args.tensors[blockIdx.y];
  const int64_t first = args.first_row();
  const int64_t stores = (args.num_rows - first) * rows.parts * (rows.bytes / rows.unit);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < stores;
       i += step) {
    store_zero(rows.store(i, first, args.num_rows), rows.unit);
  }
}

}  // namespace

void zero_tail(const ZeroTailArgs& args, Stream stream) {
  if (args.num_tensors == 0 || args.num_rows == 0) return;
  const dim3 blocks(multiprocessors(), args.num_tensors);
  zero_tail_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace cuseq::cuda
