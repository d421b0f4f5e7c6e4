#pragma once

#include "cuda/causal_conv1d.cuh"

// Contiguous tokens: a warp walks the tokens of one channel, a tile at a time, of which a lane has
// V tokens. The warps of a block have channels of their own and share the lags. A tile whose tokens
// all have all their lags, as most do, takes a path that tests no lags. Copying x to contiguous
// channels and walking those takes 3 to 5 times as long forward and 2.4 to 3.8 times with the
// backward, more if the output is copied back (H200).
namespace cuseq::cuda {

constexpr int kTokenWarps = 8;  // per block
constexpr int kTokenTiles = 8;  // per block, at most

inline ConvGrid plan_tokens(const ConvArgs& args, int vector) {
  ConvGrid grid;
  grid.chunk = kTokenTiles * kWarpSize * vector;
  grid.channel_warps = kTokenWarps;
  grid.chunks = ceil_div(args.sequences.tokens, grid.chunk);
  grid.stripes = ceil_div(args.channels, kTokenWarps);
  return grid;
}

// The tiles and the channel of a warp.
template <int V>
struct TokenWalk {
  int64_t row;
  int64_t begin;
  int64_t channel;
  int tiles;
  bool has_channel;

  __device__ __forceinline__ TokenWalk(const ConvArgs& args, const ConvGrid& grid) {
    constexpr int kTile = kWarpSize * V;
    row = args.sequences.batch == 1 ? 0 : blockIdx.x / grid.chunks;
    begin = (blockIdx.x - row * grid.chunks) * grid.tokens();
    channel = static_cast<int64_t>(blockIdx.y) * kTokenWarps + threadIdx.x / kWarpSize;
    has_channel = channel < args.channels;
    const int64_t count = min(args.sequences.tokens - begin, static_cast<int64_t>(grid.tokens()));
    tiles = static_cast<int>((count + kTile - 1) / kTile);
  }

  __device__ __forceinline__ int64_t first_of_tile(int tile) const {
    return begin + static_cast<int64_t>(tile * kWarpSize) * V;
  }

  // Return the first token of this lane in a tile.
  __device__ __forceinline__ int64_t first_token(int tile) const {
    return first_of_tile(tile) + threadIdx.x % kWarpSize * V;
  }
};

// The tokens before a tile, nearest first.
template <typename A>
struct ConvEdge {
  A values[kConvHalo];
};

// One channel of a tensor. With vectors a row has a multiple of V tokens: the outputs are dense,
// and their channels begin at multiples of V.
template <typename T, int V>
struct ConvLine {
  T* data;

  __device__ __forceinline__ ConvLine(const ConvRows& rows, int64_t row, int64_t channel)
      : data(static_cast<T*>(rows.data) + rows.at(row, 0, channel)) {}

  // Load V tokens, or zeros if they are not below `end`. Both numbers are multiples of V.
  __device__ __forceinline__ Packed<T, V> load(int64_t token, int64_t end) const {
    return token < end ? *reinterpret_cast<const Packed<T, V>*>(data + token) : Packed<T, V>{};
  }

  // Load the tokens before `token`, zeros for those not in [0, end).
  __device__ __forceinline__ ConvEdge<Arithmetic<T>> load_edge(int64_t token, int64_t end) const {
    ConvEdge<Arithmetic<T>> edge;
#pragma unroll
    for (int i = 0; i < kConvHalo; ++i) {
      const int64_t at = token - 1 - i;
      edge.values[i] = at >= 0 && at < end ? convert<Arithmetic<T>>(data[at]) : Arithmetic<T>(0);
    }
    return edge;
  }

  __device__ __forceinline__ void store(int64_t token, int64_t end,
                                        const Arithmetic<T> (&values)[V]) const {
    if (token >= end) return;
    Packed<T, V> packed;
    packed.set(values);
    *reinterpret_cast<Packed<T, V>*>(data + token) = packed;
  }
};

// A lane's tokens of one channel of x and the ones before them.
template <typename T, int V>
struct ConvWindow {
  using A = Arithmetic<T>;
  A own[V];
  A before[kConvHalo];  // token - 1, token - 2, token - 3

  // Find the tokens before own ones; `edge` has those before the tile. All lanes must call it.
  __device__ __forceinline__ void find_before(const ConvEdge<A>& edge) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int i = 0; i < kConvHalo; ++i) {
      const int lanes = 1 + i / V;  // between a token and the one i + 1 before it
      before[i] = __shfl_up_sync(kFullWarp, own[(V * lanes - 1 - i) % V], lanes);
#pragma unroll
      for (int first = 0; first < lanes; ++first) {
        if (lane == first) before[i] = edge.values[i - first * V];
      }
    }
  }

  // Return the last tokens of the tile. All lanes must call it.
  __device__ __forceinline__ ConvEdge<A> last() const {
    ConvEdge<A> edge;
#pragma unroll
    for (int i = 0; i < kConvHalo; ++i) {
      edge.values[i] = __shfl_sync(kFullWarp, own[V - 1 - i % V], kWarpSize - 1 - i / V);
    }
    return edge;
  }

  // Return the token `lag` before own token i.
  __device__ __forceinline__ A at(int i, int lag) const {
    return i >= lag ? own[i - lag] : before[lag - i - 1];
  }
};

// The lags of a lane's tokens, a byte for each.
template <int V>
struct LaneLags {
  static constexpr int kBytes = V < 4 ? V : 4;
  static_assert(kBytes == 1 || kBytes == 4);
  uint32_t words[V / kBytes] = {};

  __device__ __forceinline__ void load(const BlockLags& lags, int64_t token) {
#pragma unroll
    for (int i = 0; i < V / kBytes; ++i) {
      words[i] = kBytes == 4 ? lags.of_four(token + 4 * i) : lags.of(token + i);
    }
  }

  __device__ __forceinline__ uint32_t of(int i) const {
    return words[i / kBytes] >> 8 * (i % kBytes) & 0xff;
  }

  // Return whether every token of the tile has all lags of a kernel of width W. All lanes must call
  // it.
  template <int W>
  __device__ __forceinline__ bool are_whole() const {
    constexpr uint32_t kWhole = kBytes == 4 ? kFourWhole<W> : (1u << W) - 1;
    bool whole = true;
#pragma unroll
    for (int i = 0; i < V / kBytes; ++i) whole = whole && words[i] == kWhole;
    return __all_sync(kFullWarp, whole);
  }
};

// Reads the inputs of a lane's tokens. If the tile is whole, each token has all W lags, and none is
// tested.
template <typename T, int V, int W, bool kWhole>
struct ConvInputs {
  using A = Arithmetic<T>;
  const ConvWindow<T, V>& window;
  const BlockLags& lags;
  const LaneLags<V>& of_lane;
  int64_t token;
  int64_t channel;

  // Return what the lag of own token i reads: a token, the initial state, or nothing.
  __device__ __forceinline__ A at(int i, int lag) const {
    if (kWhole || (of_lane.of(i) >> lag & 1) != 0) return window.at(i, lag);
    if (!kReadsStates<V> || !lags.reads_state(of_lane.of(i), lag)) return A(0);
    return lags.template state<A>(token + i, of_lane.of(i), lag, channel);
  }

  __device__ __forceinline__ bool is_real(int i) const { return kWhole || of_lane.of(i) != 0; }

  // Return the convolution's sum at own token i.
  __device__ __forceinline__ A sum(const ConvWeights<A, 1>& weights, int i) const {
    A sum = weights.bias[0];
#pragma unroll
    for (int lag = 0; lag < W; ++lag) sum += weights.of_lag[lag][0] * at(i, lag);
    return sum;
  }
};

}  // namespace cuseq::cuda
