#include "ops/segment_reduce.h"

#include <cmath>
#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

// The result of some tokens of one column.
template <typename A>
struct Partial {
  A value;
  int32_t token;  // of the maximum, -1 if there is none

  __device__ __forceinline__ void take(const Partial& other, bool is_max) {
    if (!is_max) {
      value += other.value;
      return;
    }
    if (other.token < 0) return;
    // Of equal values the first token counts, and of NaNs too.
    const bool replaces = token < 0 || other.value > value || (isnan(other.value) && !isnan(value));
    const bool ties = other.value == value || (isnan(other.value) && isnan(value));
    if (replaces || (ties && other.token < token)) *this = other;
  }
};

// A block reduces up to 32 columns of one sequence. Its threads are 2^log_columns columns times
// rows; each thread takes every such row, and the threads of a column are added in a tree.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    segment_reduce_kernel(const __grid_constant__ SegmentReduceArgs args, int log_columns) {
  using A = Arithmetic<T>;
  __shared__ Partial<A> partials[kThreads];
  const bool is_max = args.kind == Reduction::kMax;
  const int rows = kThreads >> log_columns;
  const int row = threadIdx.x >> log_columns;
  const int64_t column =
      (static_cast<int64_t>(blockIdx.y) << log_columns) + (threadIdx.x & ((1 << log_columns) - 1));
  const int64_t segment = blockIdx.x;
  const int64_t offset = args.segments.seqlens.begin(segment);
  const int64_t end = args.segments.real_end(segment);
  const int64_t begin = max(offset, int64_t{0});
  const int64_t first = args.kind == Reduction::kLast ? max(begin, end - 1) : begin;
  Partial<A> mine{is_max ? static_cast<A>(-INFINITY) : A{0}, -1};
  if (column < args.columns) {
    const auto* values = static_cast<const T*>(args.values);
    for (int64_t token = first + row; token < end; token += rows) {
      mine.take({convert<A>(values[token * args.columns + column]), static_cast<int32_t>(token)},
                is_max);
    }
  }
  partials[threadIdx.x] = mine;
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) {
      partials[threadIdx.x].take(partials[threadIdx.x + (half << log_columns)], is_max);
    }
  }
  if (row > 0 || column >= args.columns) return;
  const int64_t place = segment * args.columns + column;
  A value = partials[threadIdx.x].value;
  if (args.kind == Reduction::kMean && end > begin) value /= static_cast<A>(end - begin);
  static_cast<A*>(args.out)[place] = value;
  if (is_max) args.which[place] = partials[threadIdx.x].token;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    segment_reduce_backward_kernel(const __grid_constant__ SegmentReduceArgs args) {
  using A = Arithmetic<T>;
  const int64_t all = args.segments.total_tokens * args.columns;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads;
  const int64_t last = min(first + kThreads, all) - 1;
  const BlockSegments near =
      BlockSegments::of(args.segments.seqlens, first / args.columns, last / args.columns);
  const int64_t mine = first + threadIdx.x;
  if (mine >= all) return;
  const int64_t token = mine / args.columns;
  const int64_t segment = args.segments.seqlens.segment_of(token, near.low, near.high);
  const bool is_real = args.segments.is_real(token, segment);
  const A grad =
      is_real ? spread_gradient<A>(args, token, segment, mine - token * args.columns) : A{0};
  static_cast<T*>(args.grad_values)[mine] = convert<T>(grad);
}

}  // namespace

void segment_reduce(const SegmentReduceArgs& args, Stream stream) {
  const int64_t segments = args.segments.seqlens.n_seqs;
  if (segments * args.columns == 0) return;
  int log_columns = 0;
  while (log_columns < 5 && (1 << log_columns) < args.columns) ++log_columns;
  const dim3 blocks(static_cast<unsigned>(segments),
                    static_cast<unsigned>(ceil_div(args.columns, int64_t{1} << log_columns)));
  dispatch_float(args.type, [&]<typename T>() {
    segment_reduce_kernel<T><<<blocks, kThreads, 0, stream>>>(args, log_columns);
  });
}

void segment_reduce_backward(const SegmentReduceArgs& args, Stream stream) {
  const int64_t all = args.segments.total_tokens * args.columns;
  if (all == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(all, kThreads));
  dispatch_float(args.type, [&]<typename T>() {
    segment_reduce_backward_kernel<T><<<blocks, kThreads, 0, stream>>>(args);
  });
}

}  // namespace cuseq::cuda
