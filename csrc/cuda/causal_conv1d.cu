#include "cuda/causal_conv1d.cuh"
#include "cuda/conv_rows.cuh"
#include "cuda/conv_tokens.cuh"

namespace cuseq::cuda {
namespace {

// Wider elements take more registers, so that fewer blocks run at a time.
template <typename T>
inline constexpr ConvTuning kForward{.warps = 4,
                                     .channel_warps = 4,
                                     .blocks_per_processor = sizeof(T) > 2 ? 4 : 5,
                                     .least_chunk = 8,
                                     .most_chunk = 256};

constexpr int kTokenBlocks = 5;  // of conv_tokens_kernel on a processor at a time

template <typename T, int V, int W>
__global__ void __launch_bounds__(kForward<T>.warps* kWarpSize, kForward<T>.blocks_per_processor)
    conv_rows_kernel(const __grid_constant__ ConvArgs args, const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  extern __shared__ __align__(16) uint8_t shared_lags[];
  const ConvWalk<V> walk(args, grid);
  const ConvColumn<T, V> x(args.x, walk.row, walk.channel);
  const ConvColumn<T, V> out(args.out, walk.row, walk.channel);
  int left = walk.count();  // rows from the current one on
  ConvGroup<T, V> next, after;
  next.load(x, walk.begin, left);
  after.load(x, walk.begin + kGroup, left - kGroup);
  ConvRing<A, V> ring;
  ring.start(x, walk.begin, left > 0 ? walk.begin : 0);
  ConvWeights<A, V> weights;
  if (walk.has_channels) weights.load(args, walk.channel);
  const auto lags = BlockLags::find(args, walk.row, walk.block_begin, grid.tokens(), shared_lags);
  if (!walk.has_channels) return;

  const bool has_states = kReadsStates<V> && args.initial.data != nullptr;
  const uint32_t all_lags = (1u << args.sequences.width) - 1;
  const auto activate_and_store = [&](int64_t token, A(&sums)[V]) {
    if (args.silu) {
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] *= conv_sigmoid<T>(sums[v]);
    }
    out.store(token, sums);
  };
  for (int64_t base = walk.begin; left > 0; base += kGroup, left -= kGroup) {
    const ConvGroup<T, V> group = next;
    next = after;
    after.load(x, base + 2 * kGroup, left - 2 * kGroup);
    const uint32_t of_four = lags.of_four(base);
    if (of_four == kFourWhole<W>) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        group.rows[i].get(ring.at(i));
        A sums[V];
        ring.template convolve<W>(weights, kAllLags, i, sums);
        activate_and_store(base + i, sums);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= left) break;
      const int64_t token = base + i;
      group.rows[i].get(ring.at(i));
      uint32_t known = of_four >> 8 * i & 0xff;
      if (has_states && known != 0) {
        if (known == 1 || token == walk.begin) {
          ring.read_states(lags, token, known, walk.channel, i);
        }
        known = all_lags;
      }
      A sums[V] = {};
      if (known == 0) {
        out.store(token, sums);
        continue;
      }
      ring.template convolve<W>(weights, known, i, sums);
      activate_and_store(token, sums);
    }
  }
}

template <typename T, int V, int W>
__global__ void __launch_bounds__(kTokenWarps* kWarpSize, kTokenBlocks)
    conv_tokens_kernel(const __grid_constant__ ConvArgs args,
                       const __grid_constant__ ConvGrid grid) {
  using A = Arithmetic<T>;
  __shared__ __align__(16) uint8_t shared_lags[kTokenTiles * kWarpSize * V];
  const TokenWalk<V> walk(args, grid);
  const ConvLine<T, V> x(args.x, walk.row, walk.channel);
  const ConvLine<T, V> out(args.out, walk.row, walk.channel);
  const int64_t tokens = args.sequences.tokens;
  const int64_t loads_end = walk.has_channel ? tokens : 0;
  Packed<T, V> next = x.load(walk.first_token(0), loads_end);
  ConvWeights<A, 1> weights;
  if (walk.has_channel) weights.load(args, walk.channel);
  const auto lags = BlockLags::find(args, walk.row, walk.begin, grid.tokens(), shared_lags);
  if (!walk.has_channel) return;

  ConvEdge<A> edge = x.load_edge(walk.begin, tokens);
  for (int tile = 0; tile < walk.tiles; ++tile) {
    const int64_t token = walk.first_token(tile);
    ConvWindow<T, V> window;
    next.get(window.own);
    if (tile + 1 < walk.tiles) next = x.load(walk.first_token(tile + 1), tokens);
    window.find_before(edge);
    edge = window.last();
    LaneLags<V> of_lane;
    of_lane.load(lags, token);
    A sums[V];
    const auto convolve = [&]<bool kWhole>() {
      const ConvInputs<T, V, W, kWhole> inputs{window, lags, of_lane, token, walk.channel};
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] = inputs.is_real(i) ? inputs.sum(weights, i) : A(0);
    };
    if (of_lane.template are_whole<W>()) {
      convolve.template operator()<true>();
    } else {
      convolve.template operator()<false>();
    }
    if (args.silu) {
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] *= conv_sigmoid<T>(sums[i]);
    }
    out.store(token, tokens, sums);
  }
}

template <typename A>
__global__ void final_states_kernel(const __grid_constant__ ConvArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.sequences.count() * args.channels) return;
  ConvChannel<A, ConvMemory>(args, i / args.channels, i % args.channels).write_final();
}

template <typename T, int V, int W, bool kByTokens>
void launch(const ConvArgs& args, Stream stream) {
  if constexpr (kByTokens) {
    const ConvGrid grid = plan_tokens(args, V);
    conv_tokens_kernel<T, V, W><<<blocks_of(grid, args), grid.threads(), 0, stream>>>(args, grid);
  } else {
    const ConvGrid grid = plan_rows(args, V, kForward<T>);
    conv_rows_kernel<T, V, W>
        <<<blocks_of(grid, args), grid.threads(), grid.tokens(), stream>>>(args, grid);
  }
}

}  // namespace

void causal_conv1d(const ConvArgs& args, Stream stream) {
  if (args.channels == 0) return;
  const bool has_rows = args.sequences.batch * args.sequences.tokens > 0;
  const auto run = [&]<typename T, int V, int W, bool kByTokens>() {
    if (has_rows) launch<T, V, W, kByTokens>(args, stream);
    if (args.final.data != nullptr && args.sequences.count() > 0) {
      constexpr int kThreads = 128;
      const int64_t blocks = ceil_div(args.sequences.count() * args.channels, kThreads);
      final_states_kernel<Arithmetic<T>>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    }
  };
  dispatch_conv(args, run, args.x, args.out);
}

}  // namespace cuseq::cuda
