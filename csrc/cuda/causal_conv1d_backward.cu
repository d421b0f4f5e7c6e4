#include "cuda/causal_conv1d.cuh"
#include "cuda/conv_rows.cuh"
#include "cuda/conv_tokens.cuh"

// With s the convolution's sum and g = grad_out * act'(s), the backward is
//   grad_x[t] = sum over lags i of w_i * g[t + i],  grad_w_i = sum over tokens of g[t] * x[t - i],
// each over the pairs of tokens that a lag joins. Blocks write their sums over tokens, which a
// second kernel adds up in a fixed order.
namespace cuseq::cuda {
namespace {

// Wider vectors would take the registers of other warps.
constexpr int kVectorBytes = 8;

// A chunk and the halo after it are together whole turns of the unrolled loop.
constexpr ConvTuning kBackward{.warps = 4,
                               .channel_warps = 1,
                               .blocks_per_processor = 4,
                               .waves = 2,
                               .least_chunk = 5,
                               .remainder = 1};
static_assert((kBackward.remainder + kConvHalo) % kConvUnroll == 0);

constexpr int kSums = kMaxConvWidth + 1;  // the lags', and the bias'

// Where tokens are contiguous: the last lanes only compute the halo of the ones before them.
template <int V>
inline constexpr int kHaloLanes = (kConvHalo + V - 1) / V;
template <int V>
inline constexpr int kTokenLanes = kWarpSize - kHaloLanes<V>;
template <int V>
inline constexpr int kTilesOfTokens = 32 / V;  // per warp and channel
constexpr int kChannelsPerWarp = 2;

// Write one block's sum of a channel.
template <typename A>
__device__ __forceinline__ void write_partial(const ConvBackwardArgs& args, int64_t block, int sum,
                                              int64_t channel, A value) {
  const int width = args.conv.sequences.width;
  if (sum >= width && sum < kMaxConvWidth) return;  // the kernel has no such lag
  const int64_t line = block * (width + 1) + (sum == kMaxConvWidth ? width : sum);
  static_cast<A*>(args.partials)[line * args.conv.channels + channel] = value;
}

template <typename T, int V, bool kSilu, bool kWeightGrads>
__global__ void __launch_bounds__(kBackward.warps* kWarpSize, kBackward.blocks_per_processor)
    conv_rows_backward_kernel(const __grid_constant__ ConvBackwardArgs args,
                              const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  constexpr bool kNeedsX = kSilu || kWeightGrads;
  extern __shared__ __align__(16) unsigned char shared[];
  const ConvArgs& conv = args.conv;
  const ConvWalk<V> walk(conv, grid);
  const ConvColumn<T, V> x(conv.x, walk.row, walk.channel);
  const ConvColumn<T, V> grad_out(args.grad_out, walk.row, walk.channel);
  const ConvColumn<T, V> grad_x(conv.out, walk.row, walk.channel);
  const int64_t loads_end =
      walk.has_channels ? min(walk.end + kConvHalo, conv.sequences.tokens) : 0;
  Packed<T, V> x_ahead[kConvUnroll];
  Packed<T, V> grad_ahead[kConvUnroll];
#pragma unroll
  for (int i = 0; i < kConvUnroll; ++i) {
    if (kNeedsX) x_ahead[i] = x.load(walk.begin + i, loads_end);
    grad_ahead[i] = grad_out.load(walk.begin + i, loads_end);
  }
  ConvRing<A, V> ring;
  if (kNeedsX) ring.start(x, walk.begin, loads_end);
  ConvWeights<A, V> weights;
  if (walk.has_channels) weights.load(conv, walk.channel);
  const auto lags =
      BlockLags::find(conv, walk.row, walk.block_begin, grid.tokens() + kConvHalo, shared);

  const bool has_states = kReadsStates<V> && conv.initial.data != nullptr;
  const uint32_t all_lags = (1u << conv.sequences.width) - 1;
  A sums[kSums][V] = {};
  A pending[kMaxConvWidth][V] = {};  // grad_x of the last rows, in a ring as x
  const int64_t stop = walk.has_channels ? walk.end + kConvHalo : walk.begin;
  for (int64_t base = walk.begin; base < stop; base += kConvUnroll) {
#pragma unroll
    for (int i = 0; i < kConvUnroll; ++i) {
      const int64_t token = base + i;
      const uint32_t known = lags.of(token);
      A grad[V];
      grad_ahead[i].get(grad);
      grad_ahead[i] = grad_out.load(token + kConvUnroll, loads_end);
      if (kNeedsX) {
        x_ahead[i].get(ring.at(i));
        x_ahead[i] = x.load(token + kConvUnroll, loads_end);
        uint32_t inputs = known;
        if (has_states && known != 0) {
          if (known == 1 || token == walk.begin) {
            ring.read_states(lags, token, known, walk.channel, i);
          }
          inputs = all_lags;
        }
        if constexpr (kSilu) {
          A sum[V];
          ring.convolve(weights, inputs, i, sum);
#pragma unroll
          for (int v = 0; v < V; ++v) grad[v] *= silu_slope(sum[v], conv_sigmoid<T>(sum[v]));
        }
        if (kWeightGrads && token < walk.end && known != 0) {
#pragma unroll
          for (int lag = 0; lag < kMaxConvWidth; ++lag) {
            if ((inputs >> lag & 1) == 0) continue;
#pragma unroll
            for (int v = 0; v < V; ++v) sums[lag][v] += grad[v] * ring.at(i - lag)[v];
          }
#pragma unroll
          for (int v = 0; v < V; ++v) sums[kMaxConvWidth][v] += grad[v];
        }
      }
      // Padding may hold NaN, so lags that it lacks are left out, not multiplied by zero.
#pragma unroll
      for (int v = 0; v < V; ++v) {
        pending[i][v] = known == 0 ? A(0) : weights.of_lag[0][v] * grad[v];
      }
#pragma unroll
      for (int lag = 1; lag < kMaxConvWidth; ++lag) {
        if ((known >> lag & 1) == 0) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          pending[(i - lag) & (kMaxConvWidth - 1)][v] += weights.of_lag[lag][v] * grad[v];
        }
      }
      const int64_t done = token - kConvHalo;
      if (done >= walk.begin && done < walk.end) {
        grad_x.store(done, pending[(i - kConvHalo) & (kMaxConvWidth - 1)]);
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
    for (int v = 0; v < V; ++v) block_sums[warp * kLane + v * kWarpSize + lane] = sums[sum][v];
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

template <typename T, int V>
__global__ void __launch_bounds__(kTokenWarps* kWarpSize)
    conv_tokens_backward_kernel(const __grid_constant__ ConvBackwardArgs args,
                                const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  constexpr int kTile = kTokenLanes<V> * V;  // tokens that a warp finishes at a time
  constexpr int kTiles = kTilesOfTokens<V>;
  constexpr int kHalo = kHaloLanes<V> * V;
  __shared__ uint8_t shared_lags[kTiles * kTile + kHalo];
  const ConvArgs& conv = args.conv;
  const int64_t tokens = conv.sequences.tokens;
  const int64_t row = conv.sequences.batch == 1 ? 0 : blockIdx.x / grid.chunks;
  const int64_t block_begin = (blockIdx.x - row * grid.chunks) * grid.tokens();
  const auto lags = BlockLags::find(conv, row, block_begin, grid.tokens() + kHalo, shared_lags);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const bool finishes = lane < kTokenLanes<V>;
  const uint32_t all_lags = (1u << conv.sequences.width) - 1;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kTokenWarps + warp) * kChannelsPerWarp;
  const int64_t last = min(first + kChannelsPerWarp, conv.channels);

  for (int64_t channel = first; channel < last; ++channel) {
    ConvWeights<A, 1> weights;
    weights.load(conv, channel);
    A sums[kSums] = {};
    const auto convolve_back = [&]<bool kAll>(int64_t token, const LaneLags<V>& of_lane) {
      ConvWindow<T, V> window;
      window.load(ConvLine<T, V>(conv.x, row, channel), token, tokens);
      A grad[V];
      ConvLine<T, V>(args.grad_out, row, channel).load(token, tokens, grad);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const bool is_real = kAll || of_lane.known[i] != 0;
        A inputs[kMaxConvWidth];
        A sum = weights.bias[0];
#pragma unroll
        for (int lag = 0; lag < kMaxConvWidth; ++lag) {
          inputs[lag] = conv_input<kAll>(window, lags, of_lane, token, channel, i, lag);
          sum += weights.of_lag[lag][0] * inputs[lag];
        }
        if (conv.silu) grad[i] *= silu_slope(sum, conv_sigmoid<T>(sum));
        if (!is_real) grad[i] = 0;
        if (!is_real || !finishes) continue;
#pragma unroll
        for (int lag = 0; lag < kMaxConvWidth; ++lag) sums[lag] += grad[i] * inputs[lag];
        sums[kMaxConvWidth] += grad[i];
      }
      // The next lane's first tokens reach back to this lane's last ones. Of each, only the lags
      // that stay in its sequence count.
      A result[V] = {};
#pragma unroll
      for (int i = 0; i < V + kConvHalo; ++i) {
        const int lanes = i / V;
        const A of_later =
            lanes == 0 ? grad[i % V] : __shfl_down_sync(kFullWarp, grad[i % V], lanes);
        const uint32_t known = kAll ? all_lags
                               : lanes == 0
                                   ? of_lane.known[i % V]
                                   : __shfl_down_sync(kFullWarp, of_lane.known[i % V], lanes);
#pragma unroll
        for (int lag = 0; lag < kMaxConvWidth; ++lag) {
          if (i - lag < 0 || i - lag >= V || (known >> lag & 1) == 0) continue;
          result[i - lag] += weights.of_lag[lag][0] * of_later;
        }
      }
      if (finishes) ConvLine<T, V>(conv.out, row, channel).store(token, tokens, result);
    };
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t begin = block_begin + tile * kTile;
      if (begin >= tokens) break;
      const int64_t token = begin + lane * V;
      const LaneLags<V> of_lane(lags, token);
      if (of_lane.all(all_lags)) {
        convolve_back.template operator()<true>(token, of_lane);
      } else {
        convolve_back.template operator()<false>(token, of_lane);
      }
    }
    if (args.partials == nullptr) continue;
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) {
#pragma unroll
      for (int lanes = 1; lanes < kWarpSize; lanes <<= 1) {
        sums[sum] += __shfl_xor_sync(kFullWarp, sums[sum], lanes);
      }
      if (lane == 0) write_partial(args, blockIdx.x, sum, channel, sums[sum]);
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

template <typename T, int V>
ConvGrid plan_tokens(const ConvArgs& args) {
  ConvGrid grid;
  grid.chunk = kTilesOfTokens<V> * kTokenLanes<V> * V;
  grid.chunks = ceil_div(args.sequences.tokens, grid.chunk);
  grid.stripes = ceil_div(args.channels, kTokenWarps * kChannelsPerWarp);
  return grid;
}

template <typename T, int V>
ConvGrid plan_backward(const ConvArgs& args) {
  return by_tokens<T>(args) ? plan_tokens<T, V>(args) : plan_rows(args, V, kBackward);
}

template <typename T, int V, bool kSilu>
void launch_rows(const ConvBackwardArgs& args, Stream stream) {
  const ConvGrid grid = plan_rows(args.conv, V, kBackward);
  const bool weight_grads = args.partials != nullptr;
  const auto kernel = weight_grads ? conv_rows_backward_kernel<T, V, kSilu, true>
                                   : conv_rows_backward_kernel<T, V, kSilu, false>;
  const size_t sums = weight_grads ? grid.threads() * V * sizeof(Arithmetic<T>) : 0;
  const size_t bytes = std::max<size_t>(grid.tokens() + kConvHalo, sums);
  kernel<<<blocks_of(grid, args.conv), grid.threads(), bytes, stream>>>(args, grid);
}

template <typename T, int V>
void launch_backward(const ConvBackwardArgs& args, Stream stream) {
  if (!by_tokens<T>(args.conv)) {
    return args.conv.silu ? launch_rows<T, V, true>(args, stream)
                          : launch_rows<T, V, false>(args, stream);
  }
  const ConvGrid grid = plan_tokens<T, V>(args.conv);
  conv_tokens_backward_kernel<T, V>
      <<<blocks_of(grid, args.conv), kTokenWarps * kWarpSize, 0, stream>>>(args, grid);
}

template <typename Run>
void dispatch_backward(const ConvBackwardArgs& args, const Run& run) {
  dispatch_conv<kVectorBytes>(args.conv, run, args.conv.x, args.conv.out, args.grad_out);
}

bool has_rows(const ConvSequences& sequences) { return sequences.batch * sequences.tokens > 0; }

}  // namespace

// Return the number of blocks along the tokens. It depends only on shapes, strides and the GPU
// model, so sums are reproducible.
int64_t conv_partials(const ConvBackwardArgs& args) {
  int64_t blocks = 0;
  if (!has_rows(args.conv.sequences) || args.conv.channels == 0) return blocks;
  dispatch_backward(args, [&]<typename T, int V>() {
    blocks = plan_backward<T, V>(args.conv).chunks * args.conv.sequences.batch;
  });
  return blocks;
}

void causal_conv1d_backward(const ConvBackwardArgs& args, Stream stream) {
  const ConvArgs& conv = args.conv;
  if (conv.channels == 0) return;
  dispatch_backward(args, [&]<typename T, int V>() {
    using A = Arithmetic<T>;
    if (has_rows(conv.sequences)) launch_backward<T, V>(args, stream);
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
