#include <cmath>
#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"
#include "ops/pair_rows.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

template <int V, typename T, typename A>
__device__ __forceinline__ void store_vector(T* to, const A (&values)[V]) {
  constexpr int kChunk = V * sizeof(T) <= 16 ? V : static_cast<int>(16 / sizeof(T));
#pragma unroll
  for (int i = 0; i < V; i += kChunk) {
    A chunk[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) chunk[j] = values[i + j];
    Packed<T, kChunk> packed;
    packed.set(chunk);
    *reinterpret_cast<Packed<T, kChunk>*>(to + i) = packed;
  }
}

// A group of 2^log_group lanes merges one head of one row, V elements a lane at a time.
template <typename T, typename S, int V>
__global__ void __launch_bounds__(kThreads)
    merge_rows_kernel(const __grid_constant__ MergeRowsArgs args, int log_group) {
  using A = Arithmetic<T>;
  const int groups = kThreads >> log_group;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups;
  const int64_t heads = args.count * args.heads;
  const int64_t last = min(first + groups, heads) - 1;
  const BlockSegments near =
      BlockSegments::of(args.rows.own, first / args.heads, last / args.heads);
  const int64_t mine = first + (threadIdx.x >> log_group);
  const int64_t row = mine / args.heads;
  const int64_t head = mine - row * args.heads;
  bool takes_part = mine < heads && args.rows.has(row, near.low, near.high);
  A kept = 0, other = 0;
  if (takes_part) {
    kept = static_cast<const A*>(args.logsumexp)[head * args.stride + row];
    other = static_cast<const A*>(args.part_logsumexp)[head * args.part_stride + row];
    takes_part = other != static_cast<A>(-INFINITY);
  }
  __syncwarp();  // all lanes of the group have read before one of them writes
  if (!takes_part) return;
  const A most = max(kept, other);
  const A total = most + log(exp(kept - most) + exp(other - most));
  const A keep = exp(kept - total), take = exp(other - total);
  const int lane = threadIdx.x & ((1 << log_group) - 1);
  S* out = static_cast<S*>(args.out) + mine * args.dim;
  const T* part = static_cast<const T*>(args.part) + mine * args.dim;
  for (int64_t i = lane * V; i < args.dim; i += V << log_group) {
    A sum[V], term[V];
    load_vector<V>(out + i, sum);
    load_vector<V>(part + i, term);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = keep * sum[j] + take * term[j];
    store_vector<V>(out + i, sum);
  }
  if (lane == 0) static_cast<A*>(args.logsumexp)[head * args.stride + row] = total;
}

template <typename T, typename S, int V>
__global__ void __launch_bounds__(kThreads)
    add_rows_kernel(const __grid_constant__ AddRowsArgs args) {
  using A = Arithmetic<T>;
  const int64_t width = args.width / V;
  const int64_t all = args.count * width;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads;
  const int64_t last = min(first + kThreads, all) - 1;
  const BlockSegments near = BlockSegments::of(args.rows.own, first / width, last / width);
  const int64_t mine = first + threadIdx.x;
  if (mine >= all || !args.rows.has(mine / width, near.low, near.high)) return;
  S* sum = static_cast<S*>(args.sum) + mine * V;
  A values[V], terms[V];
  load_vector<V>(sum, values);
  load_vector<V>(static_cast<const T*>(args.part) + mine * V, terms);
#pragma unroll
  for (int j = 0; j < V; ++j) values[j] += terms[j];
  store_vector<V>(sum, values);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Call run.template operator()<T, S, V>() for the dtypes of the part and of the sum and for vectors
// of 16 bytes of the part, or of one element if rows or pointers do not allow them.
template <typename Run>
void dispatch_sum(FloatType type, FloatType sum_type, int64_t size, bool aligned, const Run& run) {
  const auto vectors = [&]<typename T, typename S>() {
    constexpr int kWidth = 16 / sizeof(T);
    if (aligned && size % kWidth == 0) {
      run.template operator()<T, S, kWidth>();
    } else {
      run.template operator()<T, S, 1>();
    }
  };
  dispatch_float(type, [&]<typename T>() {
    if (sum_type == type) {
      vectors.template operator()<T, T>();
    } else {
      vectors.template operator()<T, float>();
    }
  });
}

unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(ceil_div(items, per_block));
}

}  // namespace

void merge_rows(const MergeRowsArgs& args, Stream stream) {
  if (args.count * args.heads * args.dim == 0) return;
  const bool aligned = is_aligned(args.part) && is_aligned(args.out);
  dispatch_sum(args.type, args.sum_type, args.dim, aligned, [&]<typename T, typename S, int V>() {
    int log_group = 0;
    while (log_group < 5 && (int64_t{V} << log_group) < args.dim) ++log_group;
    const unsigned blocks = blocks_for(args.count * args.heads, kThreads >> log_group);
    merge_rows_kernel<T, S, V><<<blocks, kThreads, 0, stream>>>(args, log_group);
  });
}

void add_rows(const AddRowsArgs& args, Stream stream) {
  if (args.count * args.width == 0) return;
  const bool aligned = is_aligned(args.part) && is_aligned(args.sum);
  dispatch_sum(args.type, args.sum_type, args.width, aligned, [&]<typename T, typename S, int V>() {
    const unsigned blocks = blocks_for(args.count * (args.width / V), kThreads);
    add_rows_kernel<T, S, V><<<blocks, kThreads, 0, stream>>>(args);
  });
}

}  // namespace cuseq::cuda
