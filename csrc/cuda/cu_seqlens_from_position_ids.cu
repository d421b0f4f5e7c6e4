#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/launch.cuh"
#include "ops/cu_seqlens_from_position_ids.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 512;

template <typename T>
__device__ bool starts_sequence(const PositionIdsArgs& args, int64_t token) {
  const int64_t row = token / args.cols;
  const int64_t col = token - row * args.cols;
  if (col == 0) return true;
  const T* positions = static_cast<const T*>(args.position_ids) + row * args.row_stride;
  return position_restarts(positions[(col - 1) * args.col_stride], positions[col * args.col_stride],
                           args.is_plane);
}

struct Tile {
  int64_t first;
  int64_t last;

  __device__ explicit Tile(const PositionIdsArgs& args) {
    const int64_t total = args.rows * args.cols;
    first = blockIdx.x * args.tile_size;
    last = first + args.tile_size < total ? first + args.tile_size : total;
  }
};

// First pass: count the sequences that start in each tile.
template <typename T>
__global__ void __launch_bounds__(kThreads) count_kernel(const PositionIdsArgs args) {
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  __shared__ typename Reduce::TempStorage shared;
  const Tile tile(args);
  int32_t starts = 0;
  for (int64_t token = tile.first + threadIdx.x; token < tile.last; token += kThreads) {
    starts += starts_sequence<T>(args, token);
  }
  const int32_t sum = Reduce(shared).Sum(starts);
  if (threadIdx.x == 0) args.tile_counts[blockIdx.x] = sum;
}

// Second pass: each block adds up the few counts before its tile, writes its own starts in order
// and its share of the repeated last offset. No atomics, so the result is deterministic.
template <typename T>
__global__ void __launch_bounds__(kThreads) write_kernel(const PositionIdsArgs args) {
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  } shared;
  __shared__ int32_t shared_before;
  __shared__ int32_t shared_total;

  int32_t before = 0;
  int32_t total = 0;
  for (unsigned tile = threadIdx.x; tile < gridDim.x; tile += kThreads) {
    const int32_t count = args.tile_counts[tile];
    total += count;
    if (tile < blockIdx.x) before += count;
  }
  before = Reduce(shared.reduce).Sum(before);
  __syncthreads();
  total = Reduce(shared.reduce).Sum(total);
  if (threadIdx.x == 0) {
    shared_before = before;
    shared_total = total;
  }
  __syncthreads();
  int64_t rank_base = shared_before;
  const int64_t count = shared_total;

  const Tile tile(args);
  for (int64_t base = tile.first; base < tile.last; base += kThreads) {
    const int64_t token = base + threadIdx.x;
    const int32_t starts = token < tile.last && starts_sequence<T>(args, token);
    int32_t rank;
    int32_t round_total;
    Scan(shared.scan).ExclusiveSum(starts, rank, round_total);
    __syncthreads();  // the next round reuses the storage
    if (starts && rank_base + rank < args.max_seqs) {
      args.cu_seqlens[rank_base + rank] = static_cast<int32_t>(token);
    }
    rank_base += round_total;
  }

  const int32_t end = static_cast<int32_t>(args.rows * args.cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first_unused = count < args.max_seqs ? count : args.max_seqs;
  for (int64_t i = first_unused + blockIdx.x * kThreads + threadIdx.x; i <= args.max_seqs;
       i += step) {
    args.cu_seqlens[i] = end;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.num_seqs = static_cast<int32_t>(count);
}

template <typename T>
void launch(const PositionIdsArgs& args, Stream stream) {
  const int64_t tokens = args.rows * args.cols;
  const auto tiles = static_cast<unsigned>(tokens == 0 ? 1 : ceil_div(tokens, args.tile_size));
  count_kernel<T><<<tiles, kThreads, 0, stream>>>(args);
  write_kernel<T><<<tiles, kThreads, 0, stream>>>(args);
}

}  // namespace

void cu_seqlens_from_position_ids(const PositionIdsArgs& args, Stream stream) {
  args.is_int64 ? launch<int64_t>(args, stream) : launch<int32_t>(args, stream);
}

}  // namespace cuseq::cuda
