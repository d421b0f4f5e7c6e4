#include "cuda/launch.cuh"
#include "ops/head_and_tail.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

// Store `unit` bytes: those at `from`, or zeros if it is null.
template <typename Unit>
__device__ __forceinline__ void store_as(char* to, const char* from) {
  *reinterpret_cast<Unit*>(to) = from == nullptr ? Unit{} : *reinterpret_cast<const Unit*>(from);
}

__device__ __forceinline__ void store(char* to, const char* from, int64_t unit) {
  switch (unit) {
    case 16:
      store_as<uint4>(to, from);
      break;
    case 8:
      store_as<uint2>(to, from);
      break;
    case 4:
      store_as<uint32_t>(to, from);
      break;
    case 2:
      store_as<uint16_t>(to, from);
      break;
    default:
      store_as<char>(to, from);
  }
}

// A row of blocks for each tensor. Only the device knows how many rows there are to write, so the
// grid does not depend on it; most tails are empty or short.
__global__ void __launch_bounds__(kThreads)
    zero_tail_kernel(const __grid_constant__ ZeroTailArgs args) {
  const RowBytes& rows = args.tensors[blockIdx.y];
  const int64_t first = args.first_row();
  const int64_t stores = rows.stores(args.num_rows - first);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < stores;
       i += step) {
    store(rows.store(i, first, args.num_rows), nullptr, rows.unit);
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_head_kernel(const __grid_constant__ CopyHeadArgs args) {
  const RowBytes& to = args.to[blockIdx.y];
  const RowBytes& from = args.from[blockIdx.y];
  const int64_t end = args.end_row();
  const int64_t stores = to.stores(end);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < stores;
       i += step) {
    store(to.store(i, 0, end), from.store(i, 0, end), to.unit);
  }
}

}  // namespace

void zero_tail(const ZeroTailArgs& args, Stream stream) {
  if (args.num_tensors == 0 || args.num_rows == 0) return;
  const dim3 blocks(multiprocessors(), args.num_tensors);
  zero_tail_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

void copy_head(const CopyHeadArgs& args, Stream stream) {
  constexpr int kBlocksPerMultiprocessor = 4;
  if (args.num_tensors == 0 || args.num_rows == 0) return;
  const dim3 blocks(kBlocksPerMultiprocessor * multiprocessors(), args.num_tensors);
  copy_head_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace cuseq::cuda
