#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/vectors.cuh"
#include "cuda/warp_search.cuh"
#include "ops/conv_states.h"

// Shared by the forward and the backward of the convolution.
//
// If channels are contiguous, a thread has a vector of channels and walks a chunk of tokens; the
// last rows stay in registers, so a row is read once, apart from the few before a chunk. If tokens
// are contiguous, a warp has a channel and walks its tokens, a vector for each lane, which takes
// its neighbour's last ones by a shuffle.
namespace cuseq::cuda {

constexpr int kConvHalo = kMaxConvWidth - 1;

struct ConvMemory {
  template <typename A>
  __device__ static A load(const void* data, FloatType type, int64_t index) {
    A value = 0;
    dispatch_float(type,
                   [&]<typename T>() { value = convert<A>(static_cast<const T*>(data)[index]); });
    return value;
  }

  template <typename A>
  __device__ static void store(void* data, FloatType type, int64_t index, A value) {
    dispatch_float(type, [&]<typename T>() { static_cast<T*>(data)[index] = convert<T>(value); });
  }

  template <typename A>
  __device__ static A exp(A value) {
    return ::exp(value);
  }
};

// Return the logistic function. Results in 16 bits do not show the error of the fast one, below
// 2^-16 of the value.
template <typename T>
__device__ __forceinline__ Arithmetic<T> conv_sigmoid(Arithmetic<T> value) {
  if constexpr (sizeof(T) == 2) {
    constexpr float kLog2E = 1.4426950408889634f;
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * value));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
  } else {
    return 1 / (1 + ::exp(-value));
  }
}

// Weights and bias of V channels, the weights by lag: zero where the kernel is narrower.
template <typename A, int V>
struct ConvWeights {
  A of_lag[kMaxConvWidth][V];
  A bias[V];

  __device__ __forceinline__ void load(const ConvArgs& args, int64_t channel) {
    dispatch_float(args.weight_dtype, [&]<typename W>() { load_as<W>(args, channel); });
  }

 private:
  template <typename W>
  __device__ __forceinline__ void load_as(const ConvArgs& args, int64_t channel) {
    const W* weight = static_cast<const W*>(args.weight) + channel * args.weight_strides[0];
    const int width = args.sequences.width;
    const bool rows_of_four = width == 4 && args.weight_strides[0] == 4 &&
                              args.weight_strides[1] == 1 &&
                              reinterpret_cast<uintptr_t>(weight) % (4 * sizeof(W)) % 16 == 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      A taps[kMaxConvWidth] = {};
      if (rows_of_four) {
        load_vector<kMaxConvWidth>(weight + i * 4, taps);
#pragma unroll
        for (int lag = 0; lag < kMaxConvWidth; ++lag) {
          of_lag[lag][i] = taps[kMaxConvWidth - 1 - lag];
        }
        continue;
      }
#pragma unroll
      for (int lag = 0; lag < kMaxConvWidth; ++lag) {
        of_lag[lag][i] = lag < width
                             ? convert<A>(weight[i * args.weight_strides[0] +
                                                 (width - 1 - lag) * args.weight_strides[1]])
                             : A(0);
      }
    }
    const W* biases = static_cast<const W*>(args.bias) + channel * args.bias_stride;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      bias[i] = args.bias == nullptr ? A(0) : convert<A>(biases[i * args.bias_stride]);
    }
  }
};

// Four tokens that have all the lags of a kernel of width W.
template <int W>
inline constexpr uint32_t kFourWhole = ((1u << W) - 1) * 0x01010101u;

// The lags of a block's tokens, found once for all its channels.
struct BlockLags {
  const ConvArgs& args;
  int64_t row;
  int64_t first;  // token
  int64_t low;    // segments that hold the tokens
  int64_t high;
  const uint8_t* lags;  // in shared memory

  // Find the lags of `count` tokens, a multiple of four; after the row's end they are 0. `shared`
  // has room for them and is aligned to four bytes. All threads of the block must call it.
  __device__ static BlockLags find(const ConvArgs& args, int64_t row, int64_t first, int count,
                                   uint8_t* shared) {
    const ConvSequences& sequences = args.sequences;
    const int threads = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
      shared[i] = first + i < sequences.tokens
                      ? static_cast<uint8_t>(sequences.row_lags(row, first + i))
                      : 0;
    }
    BlockLags found{args, row, first, 0, 0, shared};
    if (sequences.are_segments()) {
      found.narrow_segments(count);
      __syncthreads();
      found.cut_at_segments(reinterpret_cast<uint32_t*>(shared), count);
    }
    __syncthreads();
    return found;
  }

  __device__ __forceinline__ uint32_t of(int64_t token) const { return lags[token - first]; }

  // Return the lags of four tokens, a byte for each. The first is a multiple of four after the
  // block's first one.
  __device__ __forceinline__ uint32_t of_four(int64_t token) const {
    return *reinterpret_cast<const uint32_t*>(lags + (token - first));
  }

  // Return whether a lag of a real token reads the initial state.
  __device__ __forceinline__ bool reads_state(uint32_t known, int lag) const {
    return args.initial.data != nullptr && known != 0 && (known >> lag & 1) == 0 &&
           lag < args.sequences.width;
  }

  // Return the initial state that a lag of a token reads.
  template <typename A>
  __device__ __forceinline__ A state(int64_t token, uint32_t known, int lag,
                                     int64_t channel) const {
    const int64_t sequence = args.sequences.sequence_of(row, token, low, high);
    const int entry = args.sequences.width - 2 + __popc(known) - lag;
    return ConvMemory::load<A>(args.initial.data, args.initial.dtype,
                               args.initial.at(sequence, channel, entry));
  }

 private:
  // Find the segments that hold the tokens, where there are too many for a look at all of them, or
  // where states are looked up by segment.
  __device__ void narrow_segments(int count) {
    constexpr int kFew = 8;  // segments for each thread
    __shared__ int bounds[2];
    const SeqLens& seqlens = args.sequences.segments.seqlens;
    const int threads = static_cast<int>(blockDim.x);
    high = seqlens.n_seqs;
    if (high <= kFew * threads && args.initial.data == nullptr) return;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t last = min(first + count, args.sequences.tokens) - 1;
    for (int i = warp; i < 2; i += threads / kWarpSize) {
      const auto token = static_cast<int>(i == 0 ? first : last);
      const int segment = segment_of_warp(seqlens, token, lane);
      if (lane == 0) bounds[i] = segment;
    }
    __syncthreads();
    low = bounds[0];
    high = max(bounds[0], bounds[1]);  // offsets that do not ascend could swap them
  }

  // Take away the lags that leave a segment, and all of padding and tail. The offsets are read side
  // by side: without padding no token searches them, which is a chain of reads.
  __device__ void cut_at_segments(uint32_t* words, int count) const {
    const Segments& segments = args.sequences.segments;
    const SeqLens& seqlens = segments.seqlens;
    const int64_t end = min(first + count, args.sequences.tokens);
    const auto keep = [&](int64_t token, uint32_t kept) {
      if (token < first || token >= end) return;
      const auto i = static_cast<int>(token - first);
      const int shift = i % 4 * 8;
      atomicAnd(words + i / 4, ~(0xffu << shift) | kept << shift);
    };
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
    const int64_t head = seqlens.begin(0);
    const int64_t tail = seqlens.tail_begin();
#pragma unroll 1
    for (int64_t segment = low + thread; segment <= high; segment += threads) {
      if (segment == seqlens.n_seqs) break;  // the tail
      const int64_t begin = seqlens.begin(segment);
#pragma unroll 1
      for (int i = 0; i < kConvHalo; ++i) keep(begin + i, (2u << i) - 1);
    }
    const bool padded = segments.cu_seqlens_real != nullptr;
#pragma unroll 1
    for (int64_t token = first + thread; token < end; token += threads) {
      const bool real = token >= head && token < tail &&
                        (!padded || segments.is_real(token, seqlens.segment_of(token, low, high)));
      if (!real) keep(token, 0);
    }
  }
};

// How a grid covers tokens and channels, decided on the host. Blocks along x are chunks of tokens
// of all batch rows, along y stripes of channels.
struct ConvGrid {
  int chunk = 0;          // tokens per warp
  int token_warps = 1;    // warps per block that follow each other along the tokens
  int channel_warps = 1;  // warps per block side by side along the channels
  int64_t chunks = 0;     // blocks along the tokens of one batch row
  int64_t stripes = 0;    // blocks along the channels

  __host__ __device__ int tokens() const { return chunk * token_warps; }
  int threads() const { return token_warps * channel_warps * kWarpSize; }
};

inline dim3 blocks_of(const ConvGrid& grid, const ConvArgs& args) {
  return dim3(static_cast<unsigned>(grid.chunks * args.sequences.batch),
              static_cast<unsigned>(grid.stripes));
}

inline bool is_aligned(const ConvRows& rows, const ConvArgs& args, int vector, int64_t bytes) {
  const int64_t stride = args.channel_major ? rows.strides[2] : rows.strides[1];
  const int64_t inner = args.channel_major ? rows.strides[1] : rows.strides[2];
  return inner == 1 && reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 &&
         stride % vector == 0 && rows.strides[0] % vector == 0;
}

// Whether kernels with vectors of V elements read initial states. States are rare, and code that
// does not run costs registers and instruction fetches too.
template <int V>
inline constexpr bool kReadsStates = V == 1;

// Call run.template operator()<T, V, W, kByTokens>() for the dtype and the layout. W is the width.
// V is 1 and W the greatest width if vectors do not fit all `rows`, if there are initial states, or
// for float64, which is rare and goes by channels whatever the layout.
template <typename Run, typename... Rows>
void dispatch_conv(const ConvArgs& args, const Run& run, const Rows&... rows) {
  const auto choose = [&]<typename T, int V, bool kByTokens>() {
    const bool fits = (is_aligned(rows, args, V, V * sizeof(T)) && ...) &&
                      (kByTokens || args.channels % V == 0) && args.initial.data == nullptr;
    if (!fits) return run.template operator()<T, 1, kMaxConvWidth, kByTokens>();
    switch (args.sequences.width) {
      case 2:
        return run.template operator()<T, V, 2, kByTokens>();
      case 3:
        return run.template operator()<T, V, 3, kByTokens>();
      default:
        return run.template operator()<T, V, kMaxConvWidth, kByTokens>();
    }
  };
  const auto choose_layout = [&]<typename T>() {
    if (args.channel_major) return choose.template operator()<T, 16 / sizeof(T), true>();
    return choose.template operator()<T, 4, false>();
  };
  switch (args.dtype) {
    case FloatType::kFloat32:
      return choose_layout.template operator()<float>();
    case FloatType::kBFloat16:
      return choose_layout.template operator()<__nv_bfloat16>();
    case FloatType::kFloat16:
      return choose_layout.template operator()<__half>();
    case FloatType::kFloat64:
      return run.template operator()<double, 1, kMaxConvWidth, false>();
  }
}

}  // namespace cuseq::cuda
