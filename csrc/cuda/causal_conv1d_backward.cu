#include "cuda/causal_conv1d.cuh"
#include "cuda/conv_rows.cuh"
#include "cuda/conv_tokens.cuh"

// With s the convolution's sum and g = grad_out * act'(s), the backward is
//   grad_x[t] = sum over lags i of w_i * g[t + i],  grad_w_i = sum over tokens of g[t] * x[t - i],
// each over the pairs of tokens that a lag joins. Blocks write their sums over tokens, which a
// second kernel adds up in a fixed order.
namespace cuseq::cuda {
namespace {

// Wider elements take more registers, so that fewer blocks run at a time.
template <typename T>
inline constexpr ConvTuning kBackward{.warps = 4,
                                      .channel_warps = 1,
                                      .blocks_per_processor = sizeof(T) > 2 ? 3 : 4,
                                      .least_chunk = 8,
                                      .most_chunk = 256};

constexpr int kBackwardTokenBlocks = 4;  // of conv_tokens_backward_kernel on a processor at a time

constexpr int kSums = kMaxConvWidth + 1;  // the lags', and the bias'

// Write one block's sum of a channel.
template <typename A>
__device__ __forceinline__ void write_partial(const ConvBackwardArgs& args, int64_t block, int sum,
                                              int64_t channel, A value) {
  const int width = args.conv.sequences.width;
  if (sum >= width && sum < kMaxConvWidth) return;  // the kernel has no such lag
  const int64_t line = block * (width + 1) + (sum == kMaxConvWidth ? width : sum);
  static_cast<A*>(args.partials)[line * args.conv.channels + channel] = value;
}

// A thread's gradients while it walks its tokens: of x, in a ring as x itself, and of the weights.
template <typename A, int V, int W, bool kWeightGrads>
struct ConvGradients {
  A of_rows[kMaxConvWidth][V] = {};
  A sums[kSums][V] = {};

  // Add what row i gets and gives, where `grad` is that of its sum, to the lags that `known` has.
  // `reads` are the lags that read anything, and `counts` says whether the row is the thread's own.
  __device__ __forceinline__ void add(const ConvWeights<A, V>& weights, const ConvRing<A, V>& x,
                                      const A (&grad)[V], uint32_t known, uint32_t reads,
                                      bool counts, int i) {
    if (kWeightGrads && counts) {
#pragma unroll
      for (int lag = 0; lag < W; ++lag) {
        if ((reads >> lag & 1) == 0) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) sums[lag][v] += grad[v] * x.at(i - lag)[v];
      }
#pragma unroll
      for (int v = 0; v < V; ++v) sums[kMaxConvWidth][v] += grad[v];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) at(i)[v] = weights.of_lag[0][v] * grad[v];
#pragma unroll
    for (int lag = 1; lag < W; ++lag) {
      if ((known >> lag & 1) == 0) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) at(i - lag)[v] += weights.of_lag[lag][v] * grad[v];
    }
  }

  __device__ __forceinline__ A (&at(int i))[V] { return of_rows[i & (kMaxConvWidth - 1)]; }
};

template <typename T, int V, int W, bool kWeightGrads>
__global__ void __launch_bounds__(kBackward<T>.warps* kWarpSize, kBackward<T>.blocks_per_processor)
    conv_rows_backward_kernel(const __grid_constant__ ConvBackwardArgs args,
                              const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ConvArgs& conv = args.conv;
  const ConvWalk<V> walk(conv, grid);
  const ConvColumn<T, V> x(conv.x, walk.row, walk.channel);
  const ConvColumn<T, V> grad_out(args.grad_out, walk.row, walk.channel);
  const ConvColumn<T, V> grad_x(conv.out, walk.row, walk.channel);
  const bool needs_x = kWeightGrads || conv.silu;
  // Rows from the current one on: those of this thread, and with the ones that read them.
  int own = walk.count();
  int left = static_cast<int>(min(walk.end + kConvHalo, conv.sequences.tokens) - walk.begin);
  if (!walk.has_channels) left = 0;
  ConvGroup<T, V> next_x, next_grad;
  next_x.load(x, walk.begin, needs_x ? left : 0);
  next_grad.load(grad_out, walk.begin, left);
  ConvRing<A, V> ring;
  if (needs_x) ring.start(x, walk.begin, walk.has_channels ? walk.begin : 0);
  ConvWeights<A, V> weights;
  if (walk.has_channels) weights.load(conv, walk.channel);
  const auto lags =
      BlockLags::find(conv, walk.row, walk.block_begin, grid.tokens() + kGroup, shared);

  const bool has_states = kReadsStates<V> && conv.initial.data != nullptr;
  const uint32_t all_lags = (1u << conv.sequences.width) - 1;
  ConvGradients<A, V, W, kWeightGrads> gradients;
  // Turn the gradient of row i's output into that of its sum over the lags in `reads`.
  const auto to_sum = [&](A(&grad)[V], uint32_t reads, int i) {
    if (!conv.silu) return;
    A sum[V];
    ring.template convolve<W>(weights, reads, i, sum);
#pragma unroll
    for (int v = 0; v < V; ++v) grad[v] *= silu_slope(sum[v], conv_sigmoid<T>(sum[v]));
  };
  // The gradient of a row is whole once its last reader, kConvHalo rows later, has been added.
  for (int64_t base = walk.begin; walk.has_channels && own > -kConvHalo;
       base += kGroup, own -= kGroup, left -= kGroup) {
    const ConvGroup<T, V> of_x = next_x;
    const ConvGroup<T, V> of_grad = next_grad;
    next_x.load(x, base + kGroup, needs_x ? left - kGroup : 0);
    next_grad.load(grad_out, base + kGroup, left - kGroup);
    const uint32_t of_four = lags.of_four(base);
    const bool begins = base == walk.begin;
    if (of_four == kFourWhole<W> && own > 0) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        A grad[V];
        of_grad.rows[i].get(grad);
        if (needs_x) of_x.rows[i].get(ring.at(i));
        to_sum(grad, kAllLags, i);
        gradients.add(weights, ring, grad, kAllLags, kAllLags, true, i);
        if (i == kConvHalo || !begins) {
          grad_x.stream(base + i - kConvHalo, gradients.at(i - kConvHalo));
        }
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int64_t token = base + i;
      const uint32_t known = of_four >> 8 * i & 0xff;
      if (known == 0) {
        // Padding may hold NaN, so it is left out, not multiplied by zero.
#pragma unroll
        for (int v = 0; v < V; ++v) gradients.at(i)[v] = 0;
      } else {
        A grad[V];
        of_grad.rows[i].get(grad);
        uint32_t reads = known;
        if (needs_x) {
          of_x.rows[i].get(ring.at(i));
          if (has_states) {
            if (known == 1 || token == walk.begin) {
              ring.read_states(lags, token, known, walk.channel, i);
            }
            reads = all_lags;
          }
        }
        to_sum(grad, reads, i);
        gradients.add(weights, ring, grad, known, reads, i < own, i);
      }
      if ((i == kConvHalo || !begins) && i - kConvHalo < own) {
        grad_x.stream(token - kConvHalo, gradients.at(i - kConvHalo));
      }
    }
  }
  if constexpr (!kWeightGrads) return;

  // Add up the block's warps of the same channels, in a fixed order.
  A* block_sums = reinterpret_cast<A*>(shared);  // [warps, 32 * V]
  constexpr int kLane = kWarpSize * V;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int sum = 0; sum < kSums; ++sum) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      block_sums[warp * kLane + v * kWarpSize + lane] = gradients.sums[sum][v];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < grid.channel_warps * kLane;
         i += static_cast<int>(blockDim.x)) {
      const int channel_warp = i / kLane;
      const int column = i % kLane;
      A total = 0;
      for (int part = 0; part < grid.token_warps; ++part) {
        const int of_warp = part * grid.channel_warps + channel_warp;
        total += block_sums[of_warp * kLane + column % V * kWarpSize + column / V];
      }
      const int64_t channel =
          (static_cast<int64_t>(blockIdx.y) * grid.channel_warps + channel_warp) * kLane + column;
      if (channel < conv.channels) write_partial(args, blockIdx.x, sum, channel, total);
    }
  }
}

// The gradients of the sums at the tokens after a lane's own, and the lags that those tokens have.
template <typename A, int V>
struct ConvReaders {
  A grads[kConvHalo];
  uint32_t known[kConvHalo];

  // Find those of the tokens after own ones; `edge` has those after the tile. All lanes must call
  // it.
  __device__ __forceinline__ static ConvReaders find(const A (&grad)[V], const LaneLags<V>& of_lane,
                                                     const ConvReaders& edge) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    ConvReaders found;
#pragma unroll
    for (int i = 0; i < kConvHalo; ++i) {
      const int lanes = 1 + i / V;  // between a token and the one i + 1 after its lane's last
      found.grads[i] = __shfl_down_sync(kFullWarp, grad[i % V], lanes);
      found.known[i] = __shfl_down_sync(kFullWarp, of_lane.of(i % V), lanes);
#pragma unroll
      for (int last = 0; last < lanes; ++last) {
        if (lane != kWarpSize - 1 - last) continue;
        found.grads[i] = edge.grads[i - last * V];
        found.known[i] = edge.known[i - last * V];
      }
    }
    return found;
  }

  // Return those of the tile's first tokens. All lanes must call it.
  __device__ __forceinline__ static ConvReaders first(const A (&grad)[V],
                                                      const LaneLags<V>& of_lane) {
    ConvReaders found;
#pragma unroll
    for (int i = 0; i < kConvHalo; ++i) {
      found.grads[i] = __shfl_sync(kFullWarp, grad[i % V], i / V);
      found.known[i] = __shfl_sync(kFullWarp, of_lane.of(i % V), i / V);
    }
    return found;
  }

  template <int W>
  __device__ __forceinline__ bool are_whole() const {
    bool whole = true;
#pragma unroll
    for (int i = 0; i < W - 1; ++i) whole = whole && known[i] == (1u << W) - 1;
    return whole;
  }
};

// Walks the tiles from the last to the first, since a token's gradient needs those of the sums at
// the tokens after it. The tile after the last one has the halo only.
template <typename T, int V, int W>
__global__ void __launch_bounds__(kTokenWarps* kWarpSize, kBackwardTokenBlocks)
    conv_tokens_backward_kernel(const __grid_constant__ ConvBackwardArgs args,
                                const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  constexpr int kHaloTokens = V < kGroup ? kGroup : V;
  __shared__ __align__(16) uint8_t shared_lags[kTokenTiles * kWarpSize * V + kHaloTokens];
  const ConvArgs& conv = args.conv;
  const TokenWalk<V> walk(conv, grid);
  const ConvLine<T, V> x(conv.x, walk.row, walk.channel);
  const ConvLine<T, V> grad_out(args.grad_out, walk.row, walk.channel);
  const ConvLine<T, V> grad_x(conv.out, walk.row, walk.channel);
  const int64_t halo_end = min(walk.first_of_tile(walk.tiles) + kHaloTokens, conv.sequences.tokens);
  const int64_t loads_end = walk.has_channel ? halo_end : 0;
  int64_t token = walk.first_token(walk.tiles);
  Packed<T, V> next_x = x.load(token, loads_end);
  Packed<T, V> next_grad = grad_out.load(token, loads_end);
  ConvEdge<A> next_edge = x.load_edge(walk.first_of_tile(walk.tiles), loads_end);
  ConvWeights<A, 1> weights;
  if (walk.has_channel) weights.load(conv, walk.channel);
  const auto lags =
      BlockLags::find(conv, walk.row, walk.begin, grid.tokens() + kHaloTokens, shared_lags);
  if (!walk.has_channel) return;

  A sums[kSums] = {};
  ConvReaders<A, V> edge{};
  for (int tile = walk.tiles; tile >= 0; --tile, token -= kWarpSize * V) {
    const bool is_halo = tile == walk.tiles;
    ConvWindow<T, V> window;
    A grad[V];
    next_x.get(window.own);
    next_grad.get(grad);
    window.find_before(next_edge);
    if (tile > 0) {
      next_x = x.load(token - kWarpSize * V, halo_end);
      next_grad = grad_out.load(token - kWarpSize * V, halo_end);
      next_edge = x.load_edge(walk.first_of_tile(tile - 1), halo_end);
    }
    LaneLags<V> of_lane;
    if (token < halo_end) of_lane.load(lags, token);
    A result[V] = {};
    const auto convolve_back = [&]<bool kWhole>() {
      const ConvInputs<T, V, W, kWhole> inputs{window, lags, of_lane, token, walk.channel};
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (conv.silu) {
          const A sum = inputs.sum(weights, i);
          grad[i] *= silu_slope(sum, conv_sigmoid<T>(sum));
        }
        if (!inputs.is_real(i)) grad[i] = 0;  // padding may hold NaN
        if (is_halo || !inputs.is_real(i)) continue;
#pragma unroll
        for (int lag = 0; lag < W; ++lag) sums[lag] += grad[i] * inputs.at(i, lag);
        sums[kMaxConvWidth] += grad[i];
      }
      const auto readers = ConvReaders<A, V>::find(grad, of_lane, edge);
#pragma unroll
      for (int i = 0; i < V; ++i) {
#pragma unroll
        for (int lag = 0; lag < W; ++lag) {
          const int reader = i + lag;
          const uint32_t known = reader < V ? of_lane.of(reader) : readers.known[reader - V];
          if (!kWhole && (known >> lag & 1) == 0) continue;
          const A of_reader = reader < V ? grad[reader] : readers.grads[reader - V];
          result[i] += weights.of_lag[lag][0] * of_reader;
        }
      }
    };
    // All lanes take the same way: the edge is the same for all.
    if (of_lane.template are_whole<W>() && edge.template are_whole<W>()) {
      convolve_back.template operator()<true>();
    } else {
      convolve_back.template operator()<false>();
    }
    edge = ConvReaders<A, V>::first(grad, of_lane);
    if (!is_halo) grad_x.store(token, conv.sequences.tokens, result);
  }
  if (args.partials == nullptr) return;
#pragma unroll
  for (int sum = 0; sum < kSums; ++sum) {
#pragma unroll
    for (int lanes = 1; lanes < kWarpSize; lanes <<= 1) {
      sums[sum] += __shfl_xor_sync(kFullWarp, sums[sum], lanes);
    }
    if (threadIdx.x % kWarpSize == 0) {
      write_partial(args, blockIdx.x, sum, walk.channel, sums[sum]);
    }
  }
}

// Add up the blocks' sums, 32 columns per block: a column is one channel of one sum.
constexpr int kAdders = 8;  // warps, each with every eighth part

template <typename A>
__global__ void __launch_bounds__(kAdders* kWarpSize)
    add_partials_kernel(const __grid_constant__ ConvBackwardArgs args) {
  __shared__ A shared[kAdders][kWarpSize];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int width = args.conv.sequences.width;
  const int64_t columns = (width + 1) * args.conv.channels;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpSize + lane;
  const A* partials = static_cast<const A*>(args.partials);
  A sum = 0;
  if (column < columns) {
    for (int64_t part = warp; part < args.n_partials; part += kAdders) {
      sum += partials[part * columns + column];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  sum = 0;
#pragma unroll
  for (int i = 0; i < kAdders; ++i) sum += shared[i][lane];
  const int64_t lag = column / args.conv.channels;
  const int64_t channel = column - lag * args.conv.channels;
  if (lag < width) {
    ConvMemory::store(args.grad_weight, args.conv.weight_dtype, channel * width + width - 1 - lag,
                      sum);
  } else if (args.grad_bias != nullptr) {
    ConvMemory::store(args.grad_bias, args.conv.weight_dtype, channel, sum);
  }
}

template <typename A>
__global__ void state_gradients_kernel(const __grid_constant__ ConvBackwardArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.conv.sequences.count() * args.conv.channels) return;
  const ConvChannel<A, ConvMemory> channel(args.conv, i / args.conv.channels,
                                           i % args.conv.channels);
  if (args.grad_initial.data != nullptr) {
    channel.write_initial_gradient(args.grad_out, args.grad_initial);
  }
  if (args.conv.final.data != nullptr) channel.add_final_gradient();
}

template <typename T, int V, bool kByTokens>
ConvGrid plan_backward(const ConvArgs& args) {
  return kByTokens ? plan_tokens(args, V) : plan_rows(args, V, kBackward<T>);
}

template <typename T, int V, int W, bool kByTokens>
void launch_backward(const ConvBackwardArgs& args, Stream stream) {
  const ConvGrid grid = plan_backward<T, V, kByTokens>(args.conv);
  const dim3 blocks = blocks_of(grid, args.conv);
  if constexpr (kByTokens) {
    conv_tokens_backward_kernel<T, V, W><<<blocks, grid.threads(), 0, stream>>>(args, grid);
  } else {
    const bool weight_grads = args.partials != nullptr;
    const auto kernel = weight_grads ? conv_rows_backward_kernel<T, V, W, true>
                                     : conv_rows_backward_kernel<T, V, W, false>;
    const size_t sums = weight_grads ? grid.threads() * V * sizeof(Arithmetic<T>) : 0;
    const size_t bytes = std::max<size_t>(grid.tokens() + kGroup, sums);
    kernel<<<blocks, grid.threads(), bytes, stream>>>(args, grid);
  }
}

template <typename Run>
void dispatch_backward(const ConvBackwardArgs& args, const Run& run) {
  dispatch_conv(args.conv, run, args.conv.x, args.conv.out, args.grad_out);
}

bool has_rows(const ConvSequences& sequences) { return sequences.batch * sequences.tokens > 0; }

}  // namespace

// Return the number of blocks along the tokens. It depends only on shapes, strides and the GPU
// model, so sums are reproducible.
int64_t conv_partials(const ConvBackwardArgs& args) {
  int64_t blocks = 0;
  if (!has_rows(args.conv.sequences) || args.conv.channels == 0) return blocks;
  dispatch_backward(args, [&]<typename T, int V, int W, bool kByTokens>() {
    blocks = plan_backward<T, V, kByTokens>(args.conv).chunks * args.conv.sequences.batch;
  });
  return blocks;
}

void causal_conv1d_backward(const ConvBackwardArgs& args, Stream stream) {
  const ConvArgs& conv = args.conv;
  if (conv.channels == 0) return;
  dispatch_backward(args, [&]<typename T, int V, int W, bool kByTokens>() {
    using A = Arithmetic<T>;
    if (has_rows(conv.sequences)) launch_backward<T, V, W, kByTokens>(args, stream);
    if (args.grad_weight != nullptr) {
      const int64_t columns = (conv.sequences.width + 1) * conv.channels;
      add_partials_kernel<A>
          <<<static_cast<unsigned>(ceil_div(columns, kWarpSize)), kAdders * kWarpSize, 0, stream>>>(
              args);
    }
    const bool has_states = args.grad_initial.data != nullptr || conv.final.data != nullptr;
    if (has_states && conv.sequences.count() > 0) {
      constexpr int kThreads = 128;
      const int64_t blocks = ceil_div(conv.sequences.count() * conv.channels, kThreads);
      state_gradients_kernel<A><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    }
  });
}

}  // namespace cuseq::cuda
