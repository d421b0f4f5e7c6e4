#include <cub/block/block_reduce.cuh>

#include "cuda/launch.cuh"
#include "ops/lengths_from_padding_mask.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 512;

// One block per row of the mask.
template <typename T>
__global__ void __launch_bounds__(kThreads) count_kernel(const PaddingMaskArgs args) {
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  __shared__ typename Reduce::TempStorage shared;
  const T* row = static_cast<const T*>(args.mask) + blockIdx.x * args.row_stride;
  int32_t real = 0;
  for (int64_t col = threadIdx.x; col < args.cols; col += kThreads) {
    real += is_real_token(row[col * args.col_stride], args.kind);
  }
  const int32_t sum = Reduce(shared).Sum(real);
  if (threadIdx.x == 0) args.lengths[blockIdx.x] = sum;
}

}  // namespace

void lengths_from_padding_mask(const PaddingMaskArgs& args, Stream stream) {
  if (args.rows == 0) return;
  const auto blocks = static_cast<unsigned>(args.rows);
  switch (args.element_size) {
    case 1:
      count_kernel<uint8_t><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case 2:
      count_kernel<uint16_t><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case 4:
      count_kernel<uint32_t><<<blocks, kThreads, 0, stream>>>(args);
      break;
    default:
      count_kernel<uint64_t><<<blocks, kThreads, 0, stream>>>(args);
  }
}

}  // namespace cuseq::cuda
