#pragma once

#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>

#include "cuda/rope_dispatch.cuh"

// Shared by the forward and the backward of the rotation with RMS norm.
namespace cuseq::cuda {

// A pipeline of asynchronous copies into shared memory: kStages rows in flight, each from kSources
// tensors. Registers could hold no more than one row. A lane reads only what it fetched itself, so
// it waits only for its own copies.
template <typename T, int V, int kSources, int kStages>
class RowPipeline {
 public:
  static constexpr int kItems = kItemsPerLane<V>;
  static constexpr int kVectors = kSources * kItems * 2;  // per lane and stage
  static constexpr int kWarpBytes = kStages * kVectors * kWarpSize * V * sizeof(T);

  __device__ __forceinline__ RowPipeline(unsigned char* shared, const Lane& lane)
      : slots_(reinterpret_cast<Vector*>(shared + lane.warp * kWarpBytes) + lane.lane) {}

  // Start the copies of one head's items; vectors that do not exist are filled with zeros.
  __device__ __forceinline__ void fetch(int source, const T* head, const Item<V> (&items)[kItems],
                                        bool served) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      fetch_vector(slot(in_, source, i, 0), head + items[i].first, served && items[i].first_exists);
      fetch_vector(slot(in_, source, i, 1), head + items[i].second,
                   served && items[i].second_exists);
    }
  }

  // Close the current row, which may be empty.
  __device__ __forceinline__ void commit() {
    __pipeline_commit();
    in_ = next(in_);
  }

  // Wait for the oldest row. There is no barrier between threads, so the asm statement keeps the
  // compiler from moving reads before the wait.
  __device__ __forceinline__ void wait() {
    __pipeline_wait_prior(kStages - 1);
    asm volatile("" ::: "memory");
  }

  template <typename A>
  __device__ __forceinline__ void get(int source, int item, A (&x)[2][V]) const {
    slot(out_, source, item, 0)->get(x[0]);
    slot(out_, source, item, 1)->get(x[1]);
  }

  // Free the oldest row's slot.
  __device__ __forceinline__ void release() { out_ = next(out_); }

 private:
  using Vector = Packed<T, V>;

  __device__ __forceinline__ static int next(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }

  __device__ __forceinline__ Vector* slot(int stage, int source, int item, int half) const {
    return slots_ + (stage * kVectors + (source * kItems + item) * 2 + half) * kWarpSize;
  }

  __device__ __forceinline__ static void fetch_vector(Vector* slot, const T* source, bool exists) {
    if constexpr (sizeof(Vector) >= 4) {
      __pipeline_memcpy_async(slot, source, sizeof(Vector), exists ? 0 : sizeof(Vector));
    } else {
      *slot = exists ? *reinterpret_cast<const Vector*>(source) : Vector{};
    }
  }

  Vector* slots_;
  int in_ = 0;
  int out_ = 0;
};

template <typename A>
__device__ __forceinline__ A sum_over_group(A value, int log_group) {
  for (int lanes = (1 << log_group) >> 1; lanes > 0; lanes >>= 1) {
    value += __shfl_xor_sync(kFullWarp, value, lanes);
  }
  return value;
}

template <int V, typename A>
__device__ __forceinline__ A dot(const A (&a)[V], const A (&b)[V]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) sum += a[i] * b[i];
  return sum;
}

// The product of one item's weights and angles: y = x * own + partner * cross, where the partner is
// the other element of the pair.
template <int V, bool kInterleaved, typename A>
struct WeightedAngles {
  A own[2][V];
  A cross[2][V];

  template <typename T>
  __device__ __forceinline__ static WeightedAngles of(const Angles<T, V, kInterleaved>& angles,
                                                      const Item<V>& item,
                                                      const A (&weight)[2][V]) {
    WeightedAngles both;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int pair = kInterleaved ? half * (V / 2) + j / 2 : j;
        const bool second = kInterleaved ? j % 2 == 1 : half == 1;
        const A partner = kInterleaved ? weight[half][j ^ 1] : weight[1 - half][j];
        const A sin = second ? angles.sin[pair] : -angles.sin[pair];
        both.own[half][j] = item.turns ? weight[half][j] * angles.cos[pair] : weight[half][j];
        both.cross[half][j] = partner * sin;
      }
    }
    return both;
  }

  // Apply weights and rotation in place to x, which is already normalised.
  __device__ __forceinline__ void turn(A (&x)[2][V], bool turns) const {
    A y[2][V];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A partner = kInterleaved ? x[half][j ^ 1] : x[1 - half][j];
        const A mine = x[half][j] * own[half][j];
        y[half][j] = turns ? fma(partner, cross[half][j], mine) : mine;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < V; ++j) x[half][j] = y[half][j];
    }
  }
};

// Return whether lanes can read weights in vectors of `elements`.
inline bool weights_fit(const QkNormRopeArgs& args, int elements) {
  const int64_t bytes = std::min(16, elements * size_of(args.weight_dtype));
  return (args.weight_dtype == args.rope.dtype || args.weight_dtype == FloatType::kFloat32) &&
         multiple_of(args.norms[0].weight, bytes) && multiple_of(args.norms[1].weight, bytes);
}

// Return the warps per block whose rows and angles, with both weights, fit into the 48 KiB of
// shared memory that every GPU has.
template <typename Pipeline, typename A, Path kPath>
int warps_that_fit(const RopeArgs& rope) {
  const auto head_dim = static_cast<int>(rope.head_dim);
  const int64_t room = 48 * 1024 - padded<A>(2 * head_dim) * sizeof(A);
  const int64_t of_warp =
      Pipeline::kWarpBytes +
      (kPath != Path::kStaged ? 0 : padded<A>(static_cast<int>(rope.rotary_dim)) * sizeof(A));
  return static_cast<int>(std::clamp<int64_t>(room / of_warp, 1, kMaxWarps));
}

}  // namespace cuseq::cuda
