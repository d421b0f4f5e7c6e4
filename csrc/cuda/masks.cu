#include <climits>

#include "cuda/launch.cuh"
#include "cuda/warp_search.cuh"
#include "ops/masks.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    mask_ranges_kernel(const __grid_constant__ MaskRangesArgs args) {
  const int64_t block_first = static_cast<int64_t>(blockIdx.x) * kThreads;
  const int64_t last_token = min(block_first + kThreads, args.total_tokens) - 1;
  const SeqLens& seqlens = args.rule.segments.seqlens;
  const BlockSegments segments = BlockSegments::of(seqlens, block_first, last_token);
  const int64_t token = block_first + threadIdx.x;
  if (token >= args.total_tokens) return;
  const int64_t segment = seqlens.segment_of(token, segments.low, segments.high);
  const KeyRange keys = args.rule.keys_of(token, segment);
  args.first[token] = static_cast<int32_t>(keys.first);
  args.end[token] = static_cast<int32_t>(keys.end);
}

__device__ __forceinline__ KeyRange warp_keys_of(const MaskRule& rule, int64_t token, int lane) {
  const int segment = segment_of_warp(rule.segments.seqlens, static_cast<int>(token), lane);
  if (rule.n_spans == 0) return rule.keys_of(token, segment, -1);
  const int span = last_at_most<2>(rule.spans, static_cast<int>(rule.n_spans) - 1,
                                   static_cast<int>(token), lane);
  return rule.keys_of(token, segment, rule.spans[2 * span] <= token ? span : -1);
}

// Return 16 bytes of a line, starting at element number `begin`.
template <typename T>
__device__ __forceinline__ uint4 mask_vector(int begin, int first, int end, uint4 seen,
                                             uint4 hidden) {
  constexpr int kElements = 16 / sizeof(T);
  if (begin >= first && begin + kElements <= end) return seen;
  if (begin >= end || begin + kElements <= first) return hidden;
  const T seen_one = *reinterpret_cast<const T*>(&seen);
  const T hidden_one = *reinterpret_cast<const T*>(&hidden);
  alignas(16) T elements[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    elements[e] = begin + e >= first && begin + e < end ? seen_one : hidden_one;
  }
  return *reinterpret_cast<const uint4*>(elements);
}

// Return 16 bytes filled with the element.
template <typename T>
__device__ __forceinline__ uint4 repeated(uint64_t bits) {
#pragma unroll
  for (int width = 8 * sizeof(T); width < 64; width *= 2) bits |= bits << width;
  const auto low = static_cast<unsigned>(bits);
  const auto high = static_cast<unsigned>(bits >> 32);
  return make_uint4(low, high, low, high);
}

// A block writes part of kLinesOfBlock lines, each byte once. One warp per line looks up its keys.
constexpr int kLinesOfBlock = 4;
constexpr int kVectorsOfThread = 4;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dense_mask_kernel(const __grid_constant__ DenseMaskArgs args) {
  __shared__ int2 found[kLinesOfBlock];
  const int64_t lines = args.rows * args.queries;
  const int64_t first_line = static_cast<int64_t>(blockIdx.x) * kLinesOfBlock;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (warp < kLinesOfBlock && first_line + warp < lines) {
    const int64_t line = first_line + warp;
    const int64_t row = args.rows == 1 ? 0 : line / args.queries;
    const int64_t token = args.query_begin + row * args.row_step + line - row * args.queries;
    const int64_t key_begin = args.key_begin + row * args.row_step;
    const KeyRange keys = warp_keys_of(args.rule, token, lane);
    if (lane == 0) {
      found[warp] = make_int2(static_cast<int>(keys.first - key_begin),
                              static_cast<int>(min(keys.end - key_begin, args.keys)));
    }
  }
  __syncthreads();
  const uint4 seen = repeated<T>(args.seen);
  const uint4 hidden = repeated<T>(args.hidden);
  const int vectors = static_cast<int>(args.stride * sizeof(T) / 16);
  const int first_vector = blockIdx.y * (kThreads * kVectorsOfThread) + threadIdx.x;
#pragma unroll
  for (int l = 0; l < kLinesOfBlock; ++l) {
    if (first_line + l >= lines) return;
    const int2 keys = found[l];
    auto* line =
        reinterpret_cast<uint4*>(static_cast<T*>(args.out) + (first_line + l) * args.stride);
#pragma unroll
    for (int i = 0; i < kVectorsOfThread; ++i) {
      const int vector = first_vector + i * kThreads;
      if (vector < vectors) {
        line[vector] =
            mask_vector<T>(vector * static_cast<int>(16 / sizeof(T)), keys.x, keys.y, seen, hidden);
      }
    }
  }
}

template <typename T>
void launch_dense(const DenseMaskArgs& args, Stream stream) {
  const int64_t vectors = args.stride * static_cast<int64_t>(sizeof(T)) / 16;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.rows * args.queries, kLinesOfBlock)),
                  static_cast<unsigned>(ceil_div(vectors, kThreads * kVectorsOfThread)));
  dense_mask_kernel<T><<<grid, kThreads, 0, stream>>>(args);
}

__device__ __forceinline__ int clamp_to(int value, int length) {
  return max(0, min(value, length));
}

// Blocks of one kind, partial or full, in ascending order; a warp finds them 32 at a time.
struct WarpList {
  int32_t* count;
  int32_t* indices;
  int size;
  int found = 0;

  __device__ WarpList(int32_t* const* counts, int32_t* const* all, int kind, int64_t at, int size)
      : count(counts[kind] + at), indices(all[kind] + at * size), size(size) {}

  __device__ __forceinline__ void add(int block, bool is_one, int lane) {
    const unsigned ones = __ballot_sync(kFullWarp, is_one);
    if (is_one) indices[found + __popc(ones & ((1u << lane) - 1))] = block;
    found += __popc(ones);
  }

  __device__ __forceinline__ void close(int lane) {
    if (lane == 0) *count = found;
    for (int i = found + lane; i < size; i += kWarpSize) indices[i] = 0;
  }
};

// One warp for each block of queries finds its range of key blocks, then its lists.
__global__ void __launch_bounds__(kThreads)
    key_blocks_kernel(const __grid_constant__ BlockMaskArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  if (at >= args.rows * args.query_blocks) return;  // uniform in the warp
  const int64_t row = at / args.query_blocks;
  const auto base = static_cast<int>(row * args.row_length);
  const auto length = static_cast<int>(args.row_length);
  const int64_t begin = (at - row * args.query_blocks) * args.query_block;
  const int64_t stop = min(begin + args.query_block, args.row_length);
  int any_first = INT_MAX, any_end = 0, all_first = 0, all_end = INT_MAX;
  for (int64_t query = begin + lane; query < stop; query += kWarpSize) {
    const int first = clamp_to(args.first[base + query] - base, length);
    const int end = clamp_to(args.end[base + query] - base, length);
    any_first = min(any_first, first);
    any_end = max(any_end, end);
    all_first = max(all_first, first);
    all_end = min(all_end, end);
  }
#pragma unroll
  for (int other = kWarpSize / 2; other > 0; other /= 2) {
    any_first = min(any_first, __shfl_xor_sync(kFullWarp, any_first, other));
    any_end = max(any_end, __shfl_xor_sync(kFullWarp, any_end, other));
    all_first = max(all_first, __shfl_xor_sync(kFullWarp, all_first, other));
    all_end = min(all_end, __shfl_xor_sync(kFullWarp, all_end, other));
  }
  // A query block that extends past the end of the row is never full.
  if (stop < begin + args.query_block) all_end = 0;
  const BlockRange range =
      BlockRange::of({any_first, any_end}, {all_first, all_end}, args.key_block);
  if (lane == 0) {
    reinterpret_cast<int4*>(args.ranges)[at] =
        make_int4(static_cast<int>(range.first), static_cast<int>(range.end),
                  static_cast<int>(range.full_first), static_cast<int>(range.full_end));
  }
  const auto blocks = static_cast<int>(args.key_blocks);
  WarpList part(args.key_counts, args.key_indices, 0, at, blocks);
  WarpList whole(args.key_counts, args.key_indices, 1, at, blocks);
  for (int first = static_cast<int>(range.first); first < range.end; first += kWarpSize) {
    const int block = first + lane;
    const bool sees = range.sees(block);
    part.add(block, sees && !range.sees_all(block), lane);
    whole.add(block, sees && range.sees_all(block), lane);
  }
  part.close(lane);
  whole.close(lane);
}

// One warp for each block of keys.
__global__ void __launch_bounds__(kThreads)
    query_blocks_kernel(const __grid_constant__ BlockMaskArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  if (at >= args.rows * args.key_blocks) return;  // uniform in the warp
  const int64_t row = at / args.key_blocks;
  const int64_t key_block = at - row * args.key_blocks;
  const auto* ranges = reinterpret_cast<const int4*>(args.ranges) + row * args.query_blocks;
  const auto blocks = static_cast<int>(args.query_blocks);
  WarpList part(args.query_counts, args.query_indices, 0, at, blocks);
  WarpList whole(args.query_counts, args.query_indices, 1, at, blocks);
  for (int first = 0; first < blocks; first += kWarpSize) {
    const int block = first + lane;
    BlockRange range{0, 0, 0, 0};
    if (block < blocks) {
      const int4 four = ranges[block];
      range = {four.x, four.y, four.z, four.w};
    }
    const bool sees = range.sees(key_block);
    part.add(block, sees && !range.sees_all(key_block), lane);
    whole.add(block, sees && range.sees_all(key_block), lane);
  }
  part.close(lane);
  whole.close(lane);
}

unsigned blocks_of_warps(int64_t warps) {
  return static_cast<unsigned>(ceil_div(warps * kWarpSize, kThreads));
}

}  // namespace

void mask_ranges(const MaskRangesArgs& args, Stream stream) {
  if (args.total_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(args.total_tokens, kThreads));
  mask_ranges_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

void dense_mask(const DenseMaskArgs& args, Stream stream) {
  switch (args.element_size) {
    case 1:
      return launch_dense<uint8_t>(args, stream);
    case 2:
      return launch_dense<uint16_t>(args, stream);
    case 4:
      return launch_dense<uint32_t>(args, stream);
    default:
      return launch_dense<uint64_t>(args, stream);
  }
}

void block_mask(const BlockMaskArgs& args, Stream stream) {
  if (args.rows * args.query_blocks == 0) return;
  key_blocks_kernel<<<blocks_of_warps(args.rows * args.query_blocks), kThreads, 0, stream>>>(args);
  query_blocks_kernel<<<blocks_of_warps(args.rows * args.key_blocks), kThreads, 0, stream>>>(args);
}

}  // namespace cuseq::cuda
