#pragma once

#include "cuda/causal_conv1d.cuh"

// Contiguous channels: a thread has V channels and walks a chunk of tokens, a group at a time. A
// group whose tokens all have all their lags, as most do, takes a path that tests no lags.
namespace cuseq::cuda {

constexpr int kGroup = 4;  // tokens; also the rows that a thread keeps
static_assert(kGroup == kMaxConvWidth);

// How a kernel's grid should cover a row.
struct ConvTuning {
  int warps;                 // per block
  int channel_warps;         // most warps of a block side by side along the channels
  int blocks_per_processor;  // that run at a time
  int least_chunk;           // tokens per warp
  int most_chunk;
};

// Cover a row by blocks that run all at a time, or by a few such waves where chunks would be long.
inline ConvGrid plan_rows(const ConvArgs& args, int vector, const ConvTuning& tuning) {
  const ConvSequences& sequences = args.sequences;
  ConvGrid grid;
  const int64_t warps = ceil_div(ceil_div(args.channels, vector), kWarpSize);
  while (2 * grid.channel_warps <= tuning.channel_warps && grid.channel_warps < warps) {
    grid.channel_warps *= 2;
  }
  grid.token_warps = tuning.warps / grid.channel_warps;
  grid.stripes = ceil_div(warps, grid.channel_warps);
  const int64_t blocks = int64_t{multiprocessors()} * tuning.blocks_per_processor;
  const int64_t chunks = std::max<int64_t>(1, blocks / (grid.stripes * sequences.batch));
  const int64_t warps_of_wave = chunks * grid.token_warps;
  const int64_t waves = ceil_div(sequences.tokens, warps_of_wave * tuning.most_chunk);
  const int64_t chunk = ceil_div(sequences.tokens, warps_of_wave * waves);
  grid.chunk = static_cast<int>(std::max<int64_t>(round_up(chunk, kGroup), tuning.least_chunk));
  grid.chunks = ceil_div(sequences.tokens, grid.tokens());
  return grid;
}

// The channels of a thread in one tensor.
template <typename T, int V>
struct ConvColumn {
  T* data;
  int64_t stride;

  __device__ __forceinline__ ConvColumn(const ConvRows& rows, int64_t row, int64_t channel)
      : data(static_cast<T*>(rows.data) + rows.at(row, 0, channel)), stride(rows.strides[1]) {}

  // Load a row, or zeros if it is not in [0, end).
  __device__ __forceinline__ Packed<T, V> load(int64_t token, int64_t end) const {
    return token >= 0 && token < end ? *reinterpret_cast<const Packed<T, V>*>(data + token * stride)
                                     : Packed<T, V>{};
  }

  template <typename A>
  __device__ __forceinline__ void store(int64_t token, const A (&values)[V]) const {
    Packed<T, V> packed;
    packed.set(values);
    *reinterpret_cast<Packed<T, V>*>(data + token * stride) = packed;
  }

  // Store a row that must not push rows out of the L2 cache which neighbouring chunks read again.
  template <typename A>
  __device__ __forceinline__ void stream(int64_t token, const A (&values)[V]) const {
    Packed<T, V> packed;
    packed.set(values);
    store_streaming(reinterpret_cast<Packed<T, V>*>(data + token * stride), packed);
  }
};

// The rows of a group as they are in memory, loaded ahead of their use.
template <typename T, int V>
struct ConvGroup {
  Packed<T, V> rows[kGroup];

  // Load the rows from `token` on, of which `count` are there, zeros for the others.
  __device__ __forceinline__ void load(const ConvColumn<T, V>& column, int64_t token, int count) {
    const T* row = column.data + token * column.stride;
#pragma unroll
    for (int i = 0; i < kGroup; ++i, row += column.stride) {
      rows[i] = i < count ? *reinterpret_cast<const Packed<T, V>*>(row) : Packed<T, V>{};
    }
  }
};

// The tokens [begin, end) and the first channel of a thread.
template <int V>
struct ConvWalk {
  int64_t row;
  int64_t block_begin;
  int64_t begin;
  int64_t end;
  int64_t channel;
  bool has_channels;

  __device__ __forceinline__ ConvWalk(const ConvArgs& args, const ConvGrid& grid) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    row = args.sequences.batch == 1 ? 0 : blockIdx.x / grid.chunks;
    block_begin = (blockIdx.x - row * grid.chunks) * grid.tokens();
    begin = block_begin + warp / grid.channel_warps * grid.chunk;
    end = min(begin + grid.chunk, args.sequences.tokens);
    const int64_t stripe =
        static_cast<int64_t>(blockIdx.y) * grid.channel_warps + warp % grid.channel_warps;
    channel = (stripe * kWarpSize + lane) * V;
    has_channels = channel < args.channels && begin < end;
  }

  __device__ __forceinline__ int count() const {
    return has_channels ? static_cast<int>(end - begin) : 0;
  }
};

// The last rows of x, in a ring: row i of four is in slot i % 4, so that nothing moves.
template <typename A, int V>
struct ConvRing {
  A rows[kMaxConvWidth][V] = {};

  __device__ __forceinline__ A (&at(int i))[V] { return rows[i & (kMaxConvWidth - 1)]; }
  __device__ __forceinline__ const A (&at(int i) const)[V] { return rows[i & (kMaxConvWidth - 1)]; }

  // Load the rows before the first one.
  template <typename T>
  __device__ __forceinline__ void start(const ConvColumn<T, V>& x, int64_t begin, int64_t end) {
#pragma unroll
    for (int lag = 1; lag < kMaxConvWidth; ++lag) x.load(begin - lag, end).get(at(-lag));
  }

  // Replace the rows in front of row i's sequence by the initial state. Rows of this sequence that
  // follow find it in the ring, so this happens at the first one that the thread sees.
  __device__ __forceinline__ void read_states(const BlockLags& lags, int64_t token, uint32_t known,
                                              int64_t channel, int i) {
#pragma unroll
    for (int lag = 1; lag < kMaxConvWidth; ++lag) {
      if (!lags.reads_state(known, lag)) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        at(i - lag)[v] = lags.template state<A>(token, known, lag, channel + v);
      }
    }
  }

  // Return the sum of row i over the lags below W that `known` has.
  template <int W>
  __device__ __forceinline__ void convolve(const ConvWeights<A, V>& weights, uint32_t known, int i,
                                           A (&sums)[V]) const {
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = weights.bias[v] + weights.of_lag[0][v] * at(i)[v];
#pragma unroll
    for (int lag = 1; lag < W; ++lag) {
      if ((known >> lag & 1) == 0) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += weights.of_lag[lag][v] * at(i - lag)[v];
    }
  }
};

}  // namespace cuseq::cuda
