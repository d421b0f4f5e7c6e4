#include "cuda/causal_conv1d.cuh"
#include "cuda/conv_rows.cuh"
#include "cuda/conv_tokens.cuh"

namespace cuseq::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr ConvTuning kForward{.warps = 4,
                              .channel_warps = 4,
                              .blocks_per_processor = 4,
                              .waves = 2,
                              .least_chunk = 8,
                              .remainder = 0};

// Channels of a warp where tokens are contiguous.
constexpr int kChannelsPerWarp = 8;

template <typename T, int V, bool kSilu>
__global__ void __launch_bounds__(kForward.warps* kWarpSize, kForward.blocks_per_processor)
    conv_rows_kernel(const __grid_constant__ ConvArgs args, const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  extern __shared__ uint8_t shared_lags[];
  const ConvWalk<V> walk(args, grid);
  const ConvColumn<T, V> x(args.x, walk.row, walk.channel);
  const ConvColumn<T, V> out(args.out, walk.row, walk.channel);
  const int64_t loads_end = walk.has_channels ? walk.end : 0;
  Packed<T, V> ahead[kConvUnroll];
#pragma unroll
  for (int i = 0; i < kConvUnroll; ++i) ahead[i] = x.load(walk.begin + i, loads_end);
  ConvRing<A, V> ring;
  ring.start(x, walk.begin, loads_end);
  ConvWeights<A, V> weights;
  if (walk.has_channels) weights.load(args, walk.channel);
  const auto lags = BlockLags::find(args, walk.row, walk.block_begin, grid.tokens(), shared_lags);
  if (!walk.has_channels) return;

  const bool has_states = kReadsStates<V> && args.initial.data != nullptr;
  const uint32_t all_lags = (1u << args.sequences.width) - 1;
  for (int64_t base = walk.begin; base < walk.end; base += kConvUnroll) {
#pragma unroll
    for (int i = 0; i < kConvUnroll; ++i) {
      const int64_t token = base + i;
      if (token >= walk.end) break;
      ahead[i].get(ring.at(i));
      ahead[i] = x.load(token + kConvUnroll, walk.end);
      uint32_t known = lags.of(token);
      if (has_states && known != 0) {
        if (known == 1 || token == walk.begin) {
          ring.read_states(lags, token, known, walk.channel, i);
        }
        known = all_lags;
      }
      A sums[V];
      ring.convolve(weights, known, i, sums);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (kSilu) sums[v] *= conv_sigmoid<T>(sums[v]);
        if (known == 0) sums[v] = 0;
      }
      out.store(token, sums);
    }
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kTokenWarps* kWarpSize)
    conv_tokens_kernel(const __grid_constant__ ConvArgs args,
                       const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  __shared__ uint8_t shared_lags[kWarpSize * V];
  const int64_t tokens = args.sequences.tokens;
  const int64_t row = args.sequences.batch == 1 ? 0 : blockIdx.x / grid.chunks;
  const int64_t block_begin = (blockIdx.x - row * grid.chunks) * grid.tokens();
  const auto lags = BlockLags::find(args, row, block_begin, grid.tokens(), shared_lags);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t token = block_begin + lane * V;
  const LaneLags<V> of_lane(lags, token);
  const bool is_whole = of_lane.all((1u << args.sequences.width) - 1);
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kTokenWarps + warp) * kChannelsPerWarp;
  const int64_t last = min(first + kChannelsPerWarp, args.channels);

  const auto convolve = [&]<bool kAll>(const ConvWindow<T, V>& window, int64_t channel) {
    ConvWeights<A, 1> weights;
    weights.load(args, channel);
    A sums[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      A sum = weights.bias[0];
#pragma unroll
      for (int lag = 0; lag < kMaxConvWidth; ++lag) {
        const A input = conv_input<kAll>(window, lags, of_lane, token, channel, i, lag);
        sum += weights.of_lag[lag][0] * input;
      }
      if (args.silu) sum *= conv_sigmoid<T>(sum);
      sums[i] = kAll || of_lane.known[i] != 0 ? sum : A(0);
    }
    ConvLine<T, V>(args.out, row, channel).store(token, tokens, sums);
  };
#pragma unroll 2
  for (int64_t channel = first; channel < last; ++channel) {
    ConvWindow<T, V> window;
    window.load(ConvLine<T, V>(args.x, row, channel), token, tokens);
    if (is_whole) {
      convolve.template operator()<true>(window, channel);
    } else {
      convolve.template operator()<false>(window, channel);
    }
  }
}

template <typename A>
__global__ void final_states_kernel(const __grid_constant__ ConvArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.sequences.count() * args.channels) return;
  ConvChannel<A, ConvMemory>(args, i / args.channels, i % args.channels).write_final();
}

template <typename T, int V>
void launch_rows(const ConvArgs& args, Stream stream) {
  const ConvGrid grid = plan_rows(args, V, kForward);
  const auto kernel = args.silu ? conv_rows_kernel<T, V, true> : conv_rows_kernel<T, V, false>;
  kernel<<<blocks_of(grid, args), grid.threads(), grid.tokens(), stream>>>(args, grid);
}

template <typename T, int V>
void launch_tokens(const ConvArgs& args, Stream stream) {
  ConvGrid grid;
  grid.chunk = kWarpSize * V;
  grid.chunks = ceil_div(args.sequences.tokens, grid.chunk);
  grid.stripes = ceil_div(args.channels, kTokenWarps * kChannelsPerWarp);
  conv_tokens_kernel<T, V>
      <<<blocks_of(grid, args), kTokenWarps * kWarpSize, 0, stream>>>(args, grid);
}

}  // namespace

void causal_conv1d(const ConvArgs& args, Stream stream) {
  if (args.channels == 0) return;
  const bool has_rows = args.sequences.batch * args.sequences.tokens > 0;
  const auto run = [&]<typename T, int V>() {
    if (has_rows)
      by_tokens<T>(args) ? launch_tokens<T, V>(args, stream) : launch_rows<T, V>(args, stream);
    if (args.final.data != nullptr && args.sequences.count() > 0) {
      constexpr int kThreads = 128;
      const int64_t blocks = ceil_div(args.sequences.count() * args.channels, kThreads);
      final_states_kernel<Arithmetic<T>>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    }
  };
  dispatch_conv<kVectorBytes>(args, run, args.x, args.out);
}

}  // namespace cuseq::cuda
