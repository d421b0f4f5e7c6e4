#include "ops/logit_rows.h"

#include <cmath>
#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 512;  // a block for each row
constexpr int kWarps = kThreads / kWarpSize;

// Return e^value. What 16 bits hold does not show the error of the fast one.
template <typename T>
__device__ __forceinline__ Arithmetic<T> exp_of(Arithmetic<T> value) {
  if constexpr (sizeof(T) == 2) {
    return __expf(value);
  } else {
    return ::exp(value);
  }
}

// Return tanh(value). What 16 bits hold does not show the error of the fast one, 1e-7.
template <typename T>
__device__ __forceinline__ Arithmetic<T> tanh_of(Arithmetic<T> value) {
  if constexpr (sizeof(T) == 2) {
    return 1 - __fdividef(2.0f, 1 + __expf(2 * value));
  } else {
    return ::tanh(value);
  }
}

// The values x of a row's logits: see LogitRowsArgs.
template <typename T, bool kCapped>
struct Scaled {
  using A = Arithmetic<T>;
  A scale, cap, over_cap;  // over_cap: scale / cap

  __device__ __forceinline__ explicit Scaled(const LogitRowsArgs& args)
      : scale(static_cast<A>(args.scale)),
        cap(static_cast<A>(args.cap)),
        over_cap(kCapped ? static_cast<A>(args.scale / args.cap) : A(0)) {}

  __device__ __forceinline__ A value(A logit) const {
    return kCapped ? cap * tanh_of<T>(logit * over_cap) : logit * scale;
  }
  __device__ __forceinline__ A slope(A value) const {
    return kCapped ? scale * (1 - (value / cap) * (value / cap)) : scale;
  }
};

// The logits of a block's row, visited by its threads: vectors of 16 bytes in the middle, and one
// by one what lies around them.
template <typename T>
struct LogitRow {
  static constexpr int kVector = 16 / sizeof(T);
  T* data;
  int64_t count;

  // Call visit(index, values) for every logit, with values an array of those from `index` on. With
  // kWrites what `visit` leaves there replaces them.
  template <bool kWrites, typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    constexpr int kAhead = 4;  // vectors that a thread loads before it visits them
    const auto misaligned = reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T);
    const int64_t begin = min(count, static_cast<int64_t>((kVector - misaligned) % kVector));
    const int64_t vectors = (count - begin) / kVector;
    auto* middle = reinterpret_cast<Packed<T, kVector>*>(data + begin);
    for (int64_t base = threadIdx.x; base < vectors; base += kAhead * kThreads) {
      Packed<T, kVector> packed[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (base + j * kThreads < vectors) packed[j] = middle[base + j * kThreads];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int64_t at = base + j * kThreads;
        if (at >= vectors) break;
        visit_packed<kWrites>(visit, begin + at * kVector, packed[j], middle + at);
      }
    }
    const int64_t end = begin + vectors * kVector;
    const int64_t around = begin + count - end;
    for (int64_t i = threadIdx.x; i < around; i += kThreads) {
      const int64_t at = i < begin ? i : end + i - begin;
      auto* one = reinterpret_cast<Packed<T, 1>*>(data + at);
      visit_packed<kWrites>(visit, at, *one, one);
    }
  }

 private:
  template <bool kWrites, int V, typename Visit>
  __device__ __forceinline__ static void visit_packed(const Visit& visit, int64_t index,
                                                      Packed<T, V> packed, Packed<T, V>* to) {
    Arithmetic<T> values[V];
    packed.get(values);
    visit(index, values);
    if constexpr (kWrites) {
      packed.set(values);
      *to = packed;
    }
  }
};

// Sums over some logits of a row, as multiples of e^most.
template <typename T>
struct LogitSums {
  using A = Arithmetic<T>;
  A most = static_cast<A>(-INFINITY);
  A sum = 0;
  A weighted = 0;  // of the logits times their exponentials

  // Return e^(value - most); 0 where both are -inf.
  __device__ __forceinline__ A weight(A value) const {
    return most == static_cast<A>(-INFINITY) ? (value == most ? A(0) : A(NAN))
                                             : exp_of<T>(value - most);
  }

  __device__ __forceinline__ void raise(A to) {
    if (!(to > most)) return;
    const A less = most == static_cast<A>(-INFINITY) ? A(0) : exp_of<T>(most - to);
    most = to;
    sum *= less;
    weighted *= less;
  }

  template <bool kEntropy, int V>
  __device__ __forceinline__ void take(const A (&values)[V]) {
    A own = values[0];
#pragma unroll
    for (int i = 1; i < V; ++i) own = max(own, values[i]);
    raise(own);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const A x = values[i];
      const A one = weight(x);
      sum += one;
      if (kEntropy && x != static_cast<A>(-INFINITY)) weighted += one * x;
    }
  }

  __device__ __forceinline__ void merge(LogitSums other) {
    raise(other.most);
    other.raise(most);
    sum += other.sum;
    weighted += other.weighted;
  }

  __device__ __forceinline__ LogitSums of_lane(int away) const {
    LogitSums other;
    other.most = __shfl_xor_sync(kFullWarp, most, away);
    other.sum = __shfl_xor_sync(kFullWarp, sum, away);
    other.weighted = __shfl_xor_sync(kFullWarp, weighted, away);
    return other;
  }

  // Merge those of a block's threads, always in the same order. Thread 0 gets the result.
  __device__ __forceinline__ void merge_block() {
    __shared__ A shared[3][kWarps];
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int away = kWarpSize / 2; away > 0; away /= 2) merge(of_lane(away));
    if (lane == 0) {
      shared[0][warp] = most;
      shared[1][warp] = sum;
      shared[2][warp] = weighted;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < kWarps; ++i) {
      LogitSums other;
      other.most = shared[0][i];
      other.sum = shared[1][i];
      other.weighted = shared[2][i];
      merge(other);
    }
  }
};

template <typename T>
__device__ __forceinline__ LogitRow<T> row_of(const LogitRowsArgs& args) {
  return {static_cast<T*>(args.logits) + blockIdx.x * args.vocabulary, args.vocabulary};
}

template <typename T, bool kEntropy, bool kCapped>
__global__ void __launch_bounds__(kThreads)
    logit_rows_kernel(const __grid_constant__ LogitRowsArgs args) {
  using A = Arithmetic<T>;
  const LogitRow<T> row = row_of<T>(args);
  const Scaled<T, kCapped> scaled(args);
  LogitSums<T> sums;
  row.template for_each<false>([&]<int V>(int64_t, A(&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = scaled.value(values[i]);
    sums.template take<kEntropy>(values);
  });
  sums.merge_block();
  if (threadIdx.x != 0) return;
  const A most = sums.most == static_cast<A>(-INFINITY) ? A(0) : sums.most;
  const A total = most + log(sums.sum);
  static_cast<A*>(args.logsumexp)[blockIdx.x] = total;
  const int64_t target = args.targets[blockIdx.x];
  const bool ignored = target == kIgnoredTarget;
  const A own =
      is_token(args, target) ? scaled.value(convert<A>(row.data[target])) : static_cast<A>(NAN);
  static_cast<A*>(args.logprobs)[blockIdx.x] = ignored ? A(0) : own - total;
  if constexpr (!kEntropy) return;
  const A mean = sums.weighted / sums.sum;
  static_cast<A*>(args.mean)[blockIdx.x] = mean;
  static_cast<A*>(args.entropies)[blockIdx.x] = ignored ? A(0) : total - mean;
}

template <typename T, bool kEntropy, bool kCapped>
__global__ void __launch_bounds__(kThreads)
    logit_rows_backward_kernel(const __grid_constant__ LogitRowsArgs args) {
  using A = Arithmetic<T>;
  const Scaled<T, kCapped> scaled(args);
  const int64_t target = args.targets[blockIdx.x];
  const bool ignored = target == kIgnoredTarget;
  const bool outside = !ignored && !is_token(args, target);
  const auto gradient = [&](const void* grads) {
    if (outside) return static_cast<A>(NAN);
    return grads == nullptr || ignored ? A(0) : static_cast<const A*>(grads)[blockIdx.x];
  };
  const A of_logprob = gradient(args.grad_logprobs);
  const A of_entropy = kEntropy ? gradient(args.grad_entropies) : A(0);
  const A total = static_cast<const A*>(args.logsumexp)[blockIdx.x];
  const A mean = kEntropy ? static_cast<const A*>(args.mean)[blockIdx.x] : A(0);
  row_of<T>(args).template for_each<true>([&]<int V>(int64_t index, A(&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const A x = scaled.value(values[i]);
      A grad = index + i == target ? of_logprob : A(0);
      if (x != static_cast<A>(-INFINITY)) {
        const A factor = kEntropy ? of_logprob + of_entropy * (x - mean) : of_logprob;
        grad -= exp_of<T>(x - total) * factor;
      }
      values[i] = grad * scaled.slope(x);
    }
  });
}

// Call launch<kEntropy, kCapped>().
template <typename Launch>
void with_options(bool entropy, bool capped, const Launch& launch) {
  const auto with_entropy = [&]<bool kEntropy>() {
    capped ? launch.template operator()<kEntropy, true>()
           : launch.template operator()<kEntropy, false>();
  };
  entropy ? with_entropy.template operator()<true>() : with_entropy.template operator()<false>();
}

}  // namespace

void logit_rows(const LogitRowsArgs& args, Stream stream) {
  if (args.rows == 0) return;
  const auto blocks = static_cast<unsigned>(args.rows);
  dispatch_float(args.type, [&]<typename T>() {
    with_options(args.entropies != nullptr, args.cap != 0, [&]<bool kEntropy, bool kCapped>() {
      logit_rows_kernel<T, kEntropy, kCapped><<<blocks, kThreads, 0, stream>>>(args);
    });
  });
}

void logit_rows_backward(const LogitRowsArgs& args, Stream stream) {
  if (args.rows == 0) return;
  const auto blocks = static_cast<unsigned>(args.rows);
  dispatch_float(args.type, [&]<typename T>() {
    const bool entropy = args.grad_entropies != nullptr;
    with_options(entropy, args.cap != 0, [&]<bool kEntropy, bool kCapped>() {
      logit_rows_backward_kernel<T, kEntropy, kCapped><<<blocks, kThreads, 0, stream>>>(args);
    });
  });
}

}  // namespace cuseq::cuda
