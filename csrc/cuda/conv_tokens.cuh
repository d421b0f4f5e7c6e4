#pragma once

#include "cuda/causal_conv1d.cuh"

// Contiguous tokens: a lane has V tokens of one channel, and each warp its own channels.
namespace cuseq::cuda {

constexpr int kTokenWarps = 8;

// One channel of a tensor.
template <typename T, int V>
struct ConvLine {
  T* data;

  __device__ __forceinline__ ConvLine(const ConvRows& rows, int64_t row, int64_t channel)
      : data(static_cast<T*>(rows.data) + rows.at(row, 0, channel)) {}

  // Load the tokens from `token` on, zeros for those not below `end`. Token is a multiple of V.
  template <typename A>
  __device__ __forceinline__ void load(int64_t token, int64_t end, A (&values)[V]) const {
    if (token + V <= end) {
      reinterpret_cast<const Packed<T, V>*>(data + token)->get(values);
      return;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      values[i] = token + i < end ? convert<A>(data[token + i]) : A(0);
    }
  }

  template <typename A>
  __device__ __forceinline__ void store(int64_t token, int64_t end, const A (&values)[V]) const {
    if (token + V <= end) {
      Packed<T, V> packed;
      packed.set(values);
      *reinterpret_cast<Packed<T, V>*>(data + token) = packed;
      return;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (token + i < end) data[token + i] = convert<T>(values[i]);
    }
  }
};

// A lane's tokens of one channel of x and the ones before them.
template <typename T, int V>
struct ConvWindow {
  using A = Arithmetic<T>;
  A own[V];
  A before[kConvHalo];  // token - 1, token - 2, token - 3

  // All lanes of the warp must call it, with neighbouring tokens.
  __device__ __forceinline__ void load(const ConvLine<T, V>& x, int64_t token, int64_t end) {
    x.load(token, end, own);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int i = 0; i < kConvHalo; ++i) {
      const int lanes = V > i ? 1 : 1 + i / V;  // between a token and the one i + 1 before it
      const A found = __shfl_up_sync(kFullWarp, own[(V * lanes - 1 - i) % V], lanes);
      const int64_t at = token - 1 - i;
      before[i] = lane >= lanes ? found : at >= 0 && at < end ? convert<A>(x.data[at]) : A(0);
    }
  }

  // Return the token `lag` before own token i.
  __device__ __forceinline__ A at(int i, int lag) const {
    return i >= lag ? own[i - lag] : before[lag - i - 1];
  }
};

// The lags of a lane's tokens.
template <int V>
struct LaneLags {
  uint32_t known[V];

  __device__ __forceinline__ LaneLags(const BlockLags& lags, int64_t token) {
#pragma unroll
    for (int i = 0; i < V; ++i) known[i] = lags.of(token + i);
  }

  // Return whether every token of the warp has all its lags. All lanes must call it.
  __device__ __forceinline__ bool all(uint32_t all_lags) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < V; ++i) all = all && known[i] == all_lags;
    return __all_sync(kFullWarp, all);
  }
};

// Return what the lag of own token i reads: a token, the initial state, or nothing.
template <bool kAll, typename T, int V>
__device__ __forceinline__ Arithmetic<T> conv_input(const ConvWindow<T, V>& window,
                                                    const BlockLags& lags,
                                                    const LaneLags<V>& of_lane, int64_t token,
                                                    int64_t channel, int i, int lag) {
  using A = Arithmetic<T>;
  // A lag that the kernel does not have may lead to another sequence, which may hold NaN.
  if (kAll) return lag < lags.args.sequences.width ? window.at(i, lag) : A(0);
  if ((of_lane.known[i] >> lag & 1) != 0) return window.at(i, lag);
  if (!kReadsStates<V> || !lags.reads_state(of_lane.known[i], lag)) return A(0);
  return lags.template state<A>(token + i, of_lane.known[i], lag, channel);
}

}  // namespace cuseq::cuda
