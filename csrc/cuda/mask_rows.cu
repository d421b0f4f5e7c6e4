#include <cub/block/block_scan.cuh>

#include "cuda/launch.cuh"
#include "ops/mask_rows.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 512;

__device__ __forceinline__ int64_t inside(int64_t token, int64_t total_tokens) {
  return max(int64_t{0}, min(token, total_tokens));
}

// One block for each row of the mask, and one more for the tail. Offsets are not trusted: they are
// clamped to the row, so even segments that overlap write inside it.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    mask_rows_kernel(const __grid_constant__ MaskRowsArgs args) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage shared;
  const PaddingMaskArgs& mask = args.mask;
  const int64_t row = blockIdx.x;
  const int64_t begin = inside(args.cu_seqlens[row], args.total_tokens);
  const bool is_tail = row == mask.rows;
  const int64_t end =
      is_tail ? args.total_tokens : inside(args.cu_seqlens[row + 1], args.total_tokens);
  for (int64_t own = begin + threadIdx.x; own < end; own += kThreads) {
    args.position_ids[own] = static_cast<int32_t>(own - begin);
    args.seq_ids[own] = static_cast<int32_t>(row);
  }
  int64_t token = begin;
  for (int64_t first = 0; !is_tail && first < mask.cols; first += kThreads) {
    const int64_t col = first + threadIdx.x;
    const T* bits = static_cast<const T*>(mask.mask) + row * mask.row_stride;
    const int real = col < mask.cols && is_real_token(bits[col * mask.col_stride], mask.kind);
    int before;
    int all;
    Scan(shared).ExclusiveSum(real, before, all);
    __syncthreads();  // the next round reuses the storage
    const bool has_token = real && token + before < end;
    if (col < mask.cols) {
      const int64_t slot = row * mask.cols + col;
      args.tokens[slot] = has_token ? static_cast<int32_t>(token + before) : -1;
      if (has_token) {
        args.slots[token + before] = static_cast<int32_t>(slot);
        args.is_pad[token + before] = false;
      }
    }
    token += all;
  }
  for (int64_t pad = token + threadIdx.x; pad < end; pad += kThreads) {
    args.slots[pad] = -1;
    args.is_pad[pad] = true;
  }
}

}  // namespace

void mask_rows(const MaskRowsArgs& args, Stream stream) {
  const auto blocks = static_cast<unsigned>(args.mask.rows + 1);
  switch (args.mask.element_size) {
    case 1:
      mask_rows_kernel<uint8_t><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case 2:
      mask_rows_kernel<uint16_t><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case 4:
      mask_rows_kernel<uint32_t><<<blocks, kThreads, 0, stream>>>(args);
      break;
    default:
      mask_rows_kernel<uint64_t><<<blocks, kThreads, 0, stream>>>(args);
  }
}

}  // namespace cuseq::cuda
