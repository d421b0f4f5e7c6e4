#include <algorithm>

#include "cuda/rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows whose loads are in flight at a time, rows that a warp serves in all, and registers of a
// thread. Measured on an H200.
template <typename T>
inline constexpr int kForwardRows = sizeof(T) == 2 ? 2 : 1;
constexpr int kForwardRowsOfWarp = 4;
constexpr int kForwardRegisters = 96;

constexpr int kBackwardRows = 1;
constexpr int kBackwardRowsOfWarp = 4;
constexpr int kBackwardRegisters = 128;
constexpr int kBackwardWarps = 16;  // that a multiprocessor has registers for

__device__ __forceinline__ int threads_of_block() {
  return static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
}

__device__ __forceinline__ int thread_of_block() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

template <typename A>
__device__ __forceinline__ A sum_over_group(A value, int log_group) {
  for (int lanes = (1 << log_group) >> 1; lanes > 0; lanes >>= 1) {
    value += __shfl_xor_sync(kFullWarp, value, lanes);
  }
  return value;
}

// Puts both weights, with weight_offset, into shared memory, [2, head_dim]. The whole block calls.
template <typename A>
__device__ __forceinline__ void stage_weights(const QkNormRopeArgs& args, A* shared) {
  const int head_dim = static_cast<int>(args.rope.head_dim);
  dispatch_float(args.weight_dtype, [&]<typename Weight>() {
    for (int i = thread_of_block(); i < args.rope.n_tensors * head_dim; i += threads_of_block()) {
      const bool of_query = i < head_dim;
      const auto* weight =
          static_cast<const Weight*>(of_query ? args.norms[0].weight : args.norms[1].weight);
      shared[i] =
          convert<A>(weight[of_query ? i : i - head_dim]) + static_cast<A>(args.weight_offset);
    }
  });
  __syncthreads();
}

template <int V, typename A>
__device__ __forceinline__ A dot(const A (&a)[V], const A (&b)[V]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) sum += a[i] * b[i];
  return sum;
}

// The weights under an item; of one that does not exist, any.
template <int V, typename A>
__device__ __forceinline__ void load_weight(const A* shared_weight, const Item<V>& item,
                                            A (&first)[V], A (&second)[V]) {
  load_shared(shared_weight + (item.first_exists ? item.first : 0), first);
  load_shared(shared_weight + (item.second_exists ? item.second : 0), second);
}

// Weights and angles of one item in one: y = x * own + partner * cross, where the partner is the
// other element of the pair.
template <int V, bool kInterleaved, typename A>
struct WeightedAngles {
  A own[2][V];
  A cross[2][V];

  __device__ __forceinline__ static WeightedAngles of(const Angles<V, kInterleaved, A>& angles,
                                                      const Item<V>& item, const A* shared_weight) {
    A weight[2][V];
    load_weight(shared_weight, item, weight[0], weight[1]);
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

  // The item, of x already normalised.
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

// Shared memory of a block: angles of each warp, then the weights.
template <typename A>
struct Shared {
  A* cos;
  A* sin;
  A* weights;

  __device__ __forceinline__ static Shared of(const RopeArgs& args, const Lane& lane,
                                              unsigned char* memory) {
    const int rotary_dim = static_cast<int>(args.rotary_dim);
    const int warps = threads_of_block() / kWarpSize;
    A* angles = reinterpret_cast<A*>(memory);
    Shared shared;
    shared.cos = angles + lane.warp * rotary_dim;
    shared.sin = shared.cos + rotary_dim / 2;
    shared.weights = angles + padded(warps * rotary_dim);
    return shared;
  }

  // Up to a multiple of 16 bytes.
  __host__ __device__ static int padded(int elements) {
    constexpr int kUnit = 16 / sizeof(A);
    return (elements + kUnit - 1) / kUnit * kUnit;
  }

  static size_t bytes(const RopeArgs& args, const RopeGeometry& geometry) {
    const int warps = warps_of(geometry);
    return (padded(warps * static_cast<int>(args.rotary_dim)) + 2 * args.head_dim) * sizeof(A);
  }
};

template <typename T, int V, bool kInterleaved>
__global__ void __maxnreg__(kForwardRegisters)
    qk_norm_rope_kernel(const __grid_constant__ QkNormRopeArgs args,
                        const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  constexpr int kRows = kForwardRows<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const RopeArgs& rope = args.rope;
  const Lane lane = Lane::of(rope, geometry, blockIdx.x);
  const Shared<A> shared = Shared<A>::of(rope, lane, shared_memory);
  stage_weights(args, shared.weights);
  if (lane.token >= static_cast<uint32_t>(rope.batch * rope.tokens)) return;

  Item<V> items[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    items[i] = Item<V>::of(lane.lane_of_group + (i << geometry.log_group), rope, geometry);
  }
  const auto inputs = inputs_of<T>(rope, lane);
  const auto outputs = outputs_of<T>(rope, lane);
  const A* weights = shared.weights + lane.tensor * rope.head_dim;
  A* rstds = static_cast<A*>(args.norms[lane.tensor].rstd);
  if (rstds != nullptr) rstds += lane.token * rope.tensors[lane.tensor].heads;
  Pair<T, V> data[kRows][kItems];
  const auto load = [&](int first_row) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool served = lane.serves(rope, first_row + r);
#pragma unroll
      for (int i = 0; i < kItems; ++i) data[r][i].load(inputs[first_row + r], items[i], served);
    }
  };

  load(0);
  stage_angles(rope, lane, rope.conjugate, shared.cos, shared.sin);
  WeightedAngles<V, kInterleaved, A> angles[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    angles[i] = WeightedAngles<V, kInterleaved, A>::of(
        Angles<V, kInterleaved, A>::of(rope, items[i], shared.cos, shared.sin), items[i], weights);
  }
  for (int first_row = 0; first_row < lane.rows; first_row += kRows) {
    if (first_row > 0) load(first_row);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool served = lane.serves(rope, first_row + r);
      A x[kItems][2][V];
      A squares = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        data[r][i].get(x[i][0], x[i][1]);
        squares += dot(x[i][0], x[i][0]) + dot(x[i][1], x[i][1]);
      }
      squares = sum_over_group(squares, geometry.log_group);
      const A rstd = rsqrt(squares * static_cast<A>(args.mean_factor) + static_cast<A>(args.eps));
      if (rstds != nullptr && served && lane.lane_of_group == 0) {
        rstds[lane.head(first_row + r)] = rstd;
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          x[i][0][j] *= rstd;
          x[i][1][j] *= rstd;
        }
        angles[i].turn(x[i], items[i].turns);
        data[r][i].set(x[i][0], x[i][1]);
        data[r][i].store(outputs[first_row + r], items[i], served);
      }
    }
  }
}

// With n = x * rstd, y = turn(n * w): for g = turn back(dy) * w,
//   dx = rstd * (g - n * mean(g * n)),  dw = sum over tokens and heads of turn back(dy) * n.
// A fixed grid walks the tokens, and each block writes its part of dw: sums have one order,
// whatever runs first.
template <typename T, int V, bool kInterleaved>
__global__ void __maxnreg__(kBackwardRegisters)
    qk_norm_rope_backward_kernel(const __grid_constant__ QkNormRopeArgs args,
                                 const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  constexpr int kRows = kBackwardRows;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const RopeArgs& rope = args.rope;
  const auto tokens = static_cast<uint32_t>(rope.batch * rope.tokens);
  const int head_dim = static_cast<int>(rope.head_dim);
  Lane lane = Lane::of(rope, geometry, blockIdx.x);
  const Shared<A> shared = Shared<A>::of(rope, lane, shared_memory);
  stage_weights(args, shared.weights);
  const A* weights = shared.weights + lane.tensor * head_dim;
  const HeadNorm& norm = args.norms[lane.tensor];

  Item<V> items[kItems];
  A sums[kItems][2][V] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    items[i] = Item<V>::of(lane.lane_of_group + (i << geometry.log_group), rope, geometry);
  }

  for (uint32_t block = blockIdx.x; block < geometry.token_blocks; block += gridDim.x) {
    lane.move_to(rope, geometry, block);
    if (lane.token >= tokens) break;  // the whole warp
    const auto output_grads = inputs_of<T>(rope, lane);
    const auto input_grads = outputs_of<T>(rope, lane);
    const auto inputs =
        Heads<const T>::of(static_cast<const T*>(norm.input), norm.input_strides, lane);
    const A* rstds = static_cast<const A*>(norm.rstd) +
                     static_cast<int64_t>(lane.token) * rope.tensors[lane.tensor].heads;
    Angles<V, kInterleaved, A> angles[kItems];
    for (int first_row = 0; first_row < lane.rows; first_row += kRows) {
      Pair<T, V> grads[kRows][kItems];
      Pair<T, V> data[kRows][kItems];
      A rstd[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = first_row + r;
        const bool served = lane.serves(rope, row);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          grads[r][i].load(output_grads[row], items[i], served);
          data[r][i].load(inputs[row], items[i], served);
        }
        rstd[r] = served ? rstds[lane.head(row)] : static_cast<A>(0);
      }
      if (first_row == 0) {
        __syncwarp();  // all lanes have read the angles of the token before
        stage_angles(rope, lane, !rope.conjugate, shared.cos, shared.sin);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          angles[i] = Angles<V, kInterleaved, A>::of(rope, items[i], shared.cos, shared.sin);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        A g[kItems][2][V];
        A n[kItems][2][V];
        A mean = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          grads[r][i].get(g[i][0], g[i][1]);
          data[r][i].get(n[i][0], n[i][1]);
          if (items[i].turns) angles[i].turn(g[i][0], g[i][1]);
          A weight[2][V];
          load_weight(weights, items[i], weight[0], weight[1]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
              n[i][half][j] *= rstd[r];
              sums[i][half][j] += g[i][half][j] * n[i][half][j];
              g[i][half][j] *= weight[half][j];
            }
            mean += dot(g[i][half], n[i][half]);
          }
        }
        mean = sum_over_group(mean, geometry.log_group) * static_cast<A>(args.mean_factor);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
              g[i][half][j] = rstd[r] * (g[i][half][j] - n[i][half][j] * mean);
            }
          }
          grads[r][i].set(g[i][0], g[i][1]);
          grads[r][i].store(input_grads[first_row + r], items[i], lane.serves(rope, first_row + r));
        }
      }
    }
  }
  if (args.partials == nullptr) return;

  // Over the groups of a warp, then over the warps of the block, each time in one order.
  __syncthreads();                                      // nobody reads angles or weights any more
  A* block_sums = reinterpret_cast<A*>(shared_memory);  // [warps, head_dim]
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = half == 0 ? items[i].first_exists : items[i].second_exists;
      const int column = half == 0 ? items[i].first : items[i].second;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        A sum = sums[i][half][j];
        for (int lanes = 1 << geometry.log_group; lanes < kWarpSize; lanes <<= 1) {
          sum += __shfl_xor_sync(kFullWarp, sum, lanes);
        }
        if (exists && lane.group == 0) block_sums[lane.warp * head_dim + column + j] = sum;
      }
    }
  }
  __syncthreads();
  const int64_t block_index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  A* partial = static_cast<A*>(args.partials) + block_index * 2 * head_dim;
  for (int i = thread_of_block(); i < 2 * head_dim; i += threads_of_block()) {
    const bool of_query = i < head_dim;
    const int column = of_query ? i : i - head_dim;
    A sum = 0;
    for (int warp = 0; warp < threads_of_block() / kWarpSize; ++warp) {
      const int warp_of_token =
          static_cast<int>(blockIdx.y) * geometry.warps_per_token + warp % geometry.warps_per_token;
      const bool is_query = warp_of_token < geometry.tensors[0].count;
      if (is_query == of_query) sum += block_sums[warp * head_dim + column];
    }
    partial[i] = sum;
  }
}

template <typename A>
__device__ void store_as(void* out, FloatType type, int64_t index, A value) {
  switch (type) {
    case FloatType::kFloat32:
      static_cast<float*>(out)[index] = convert<float>(value);
      return;
    case FloatType::kFloat64:
      static_cast<double*>(out)[index] = convert<double>(value);
      return;
    case FloatType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[index] = convert<__nv_bfloat16>(value);
      return;
    case FloatType::kFloat16:
      static_cast<__half*>(out)[index] = convert<__half>(value);
      return;
  }
}

// A block adds up 32 columns of the partial sums: lane by column, warp by every 32nd part.
template <typename A>
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(const __grid_constant__ QkNormRopeArgs args) {
  __shared__ A sums[kWarpSize][kWarpSize + 1];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t head_dim = args.rope.head_dim;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpSize + lane;
  const A* partials = static_cast<const A*>(args.partials);
  A sum = 0;
  if (column < 2 * head_dim) {
    for (int64_t i = warp; i < args.n_partials; i += kWarpSize) {
      sum += partials[i * 2 * head_dim + column];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= 2 * head_dim) return;
  sum = 0;
#pragma unroll
  for (int i = 0; i < kWarpSize; ++i) sum += sums[i][lane];
  const bool of_q = column < head_dim;
  void* out = of_q ? args.norms[0].weight_grad : args.norms[1].weight_grad;
  if (out != nullptr) store_as(out, args.weight_dtype, of_q ? column : column - head_dim, sum);
}

bool inputs_fit(const QkNormRopeArgs& args, int64_t elements) {
  const int64_t bytes = elements * size_of(args.rope.dtype);
  bool fit = true;
  for (const HeadNorm& norm : args.norms) {
    fit = fit && multiple_of(norm.input, bytes) && multiples_of(norm.input_strides, elements);
  }
  return fit;
}

RopeGeometry backward_geometry(const RopeArgs& rope, int elements) {
  return rope_geometry(rope, elements, kBackwardRowsOfWarp, /*copies=*/true);
}

template <typename T, int V, bool kInterleaved>
void launch_backward(const QkNormRopeArgs& args, Stream stream) {
  using A = Arithmetic<T>;
  const RopeArgs& rope = args.rope;
  const RopeGeometry geometry = backward_geometry(rope, V);
  // At most 8 warps of 512 columns of 8 bytes, and both weights: below the 48 KiB of any block.
  static_assert(kMaxWarps * 512 * 8 + 2 * 512 * 8 <= 48 * 1024);
  const size_t shared = std::max<size_t>(Shared<A>::bytes(rope, geometry),
                                         warps_of(geometry) * rope.head_dim * sizeof(A));
  const auto kernel = qk_norm_rope_backward_kernel<T, V, kInterleaved>;
  const dim3 grid(static_cast<unsigned>(args.n_partials / geometry.warp_blocks),
                  geometry.warp_blocks);
  kernel<<<grid, threads_of(geometry), shared, stream>>>(args, geometry);
  if (args.partials == nullptr) return;
  const auto blocks = static_cast<unsigned>(ceil_div(2 * rope.head_dim, kWarpSize));
  sum_partials_kernel<A><<<blocks, 1024, 0, stream>>>(args);
}

}  // namespace

void apply_qk_norm_rope(const QkNormRopeArgs& args, Stream stream) {
  const RopeArgs& rope = args.rope;
  if (has_no_work(rope)) return;
  dispatch_rope(rope, [&]<typename T, int V, bool kInterleaved>() {
    const RopeGeometry geometry = rope_geometry(rope, V, kForwardRowsOfWarp, /*copies=*/true);
    const size_t shared = Shared<Arithmetic<T>>::bytes(rope, geometry);
    qk_norm_rope_kernel<T, V, kInterleaved>
        <<<blocks_of(geometry), threads_of(geometry), shared, stream>>>(args, geometry);
  });
}

// Calls run.template operator()<T, V, kInterleaved>() with vectors that fit the inputs too.
template <typename Run>
void dispatch_backward(const QkNormRopeArgs& args, const Run& run) {
  dispatch_rope(args.rope, [&]<typename T, int V, bool kInterleaved>() {
    if (inputs_fit(args, V)) {
      run.template operator()<T, V, kInterleaved>();
    } else {
      run.template operator()<T, 1, false>();
    }
  });
}

// Blocks that run at a time, for each of the blocks that share a token: the same for one shape on
// one kind of GPU, so that sums have one order.
int64_t qk_norm_rope_partials(const QkNormRopeArgs& args) {
  int device = 0;
  int processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  int64_t blocks = 1;
  dispatch_backward(args, [&]<typename T, int V, bool kInterleaved>() {
    const RopeGeometry geometry = backward_geometry(args.rope, V);
    const int64_t at_a_time = processors * std::max(1, kBackwardWarps / warps_of(geometry));
    blocks = std::clamp<int64_t>(geometry.token_blocks, 1, at_a_time) * geometry.warp_blocks;
  });
  return blocks;
}

void apply_qk_norm_rope_backward(const QkNormRopeArgs& args, Stream stream) {
  dispatch_backward(args, [&]<typename T, int V, bool kInterleaved>() {
    launch_backward<T, V, kInterleaved>(args, stream);
  });
}

}  // namespace cuseq::cuda
