#include <algorithm>

#include "cuda/plain_rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows per warp, rows in flight, and registers per thread, measured as for the forward. The
// backward's warps are persistent, so few rows per warp distribute the work evenly.
constexpr int kBackwardRows = 2;
constexpr int kBackwardStages = 2;
template <typename T, int V>
inline constexpr int kBackwardRegisters =
    sizeof(T) == 8 ? 255 : (V == 8 ? 96 : (V == 4 ? 128 : 168));

// Rows and registers of plain calls with frozen weights whose warps run in a few waves.
constexpr int kPlainRows = 1;
constexpr int kPlainRegisters = 64;
constexpr int kPlainWaves = 6;

__device__ __forceinline__ int threads_of_block() {
  return static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
}

__device__ __forceinline__ int thread_of_block() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

// Write both weights plus weight_offset to shared memory, [2, head_dim]. All threads of the block
// must call it.
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

// Load an item's weights. A vector that does not exist gets arbitrary weights.
template <int V, typename A>
__device__ __forceinline__ void load_weight(const A* shared_weight, const Item<V>& item,
                                            A (&first)[V], A (&second)[V]) {
  load_vector<V>(shared_weight + (item.first_exists ? item.first : 0), first);
  load_vector<V>(shared_weight + (item.second_exists ? item.second : 0), second);
}

// The forward's inputs, which the backward reads in addition to the gradients.
struct HeadInputs {
  HeadMemory of[2];
};

template <typename T, int V>
using BackwardPipeline = RowPipeline<T, V, 2, kBackwardStages>;

// The forward is n = x * rstd, y = rotate(n * w). With g = rotate_back(dy) * w, the backward is
//   dx = rstd * (g - n * mean(g * n)),  dw = sum over tokens and heads of rotate_back(dy) * n.
// A fixed grid walks the tokens and each block writes its partial sum of dw, so the order of
// summation does not depend on scheduling. kWeightGrads = false, for frozen weights, skips dw.
template <typename T, int V, bool kInterleaved, Path kPath, bool kWeightGrads>
__global__ void __maxnreg__((kBackwardRegisters<T, V>))
    qk_norm_rope_backward_kernel(const __grid_constant__ QkNormRopeArgs args,
                                 const __grid_constant__ RopeGeometry geometry,
                                 const __grid_constant__ HeadInputs head_inputs) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const RopeArgs& rope = args.rope;
  const int head_dim = static_cast<int>(rope.head_dim);
  Lane lane = Lane::of<kPath>(rope, geometry, blockIdx.x);
  A* shared_angles = reinterpret_cast<A*>(shared_memory);
  A* shared_weights = shared_angles + angle_elements<A, kPath>(rope, geometry);
  const A* weights = shared_weights + lane.tensor * head_dim;
  BackwardPipeline<T, V> rows(
      reinterpret_cast<unsigned char*>(shared_weights + padded<A>(2 * head_dim)), lane);
  const TensorPlan& tensor = geometry.tensors[lane.tensor];
  const A* rstds = static_cast<const A*>(args.norms[lane.tensor].rstd);

  Item<V> items[kItems];
  find_items<kPath>(lane.lane_of_group, rope, geometry, items);
  A sums[kItems][2][V] = {};
  Angles<T, V, kInterleaved> angles[kItems];

  // This warp walks the rows of its tokens in order. `ahead` is the row to fetch next.
  const auto exists = [&](const Lane& of, uint32_t block) {
    return lane.rows > 0 && block < geometry.token_blocks && of.token < geometry.tokens;
  };
  Lane ahead = lane;
  uint32_t block_ahead = blockIdx.x;
  int row_ahead = 0;
  const auto fetch = [&] {
    if (exists(ahead, block_ahead)) {
      const bool served = ahead.head(row_ahead) < tensor.heads;
      rows.fetch(0, Rows::of<kPath>(tensor.in, ahead).template head<const T>(row_ahead), items,
                 served);
      rows.fetch(
          1, Rows::of<kPath>(head_inputs.of[ahead.tensor], ahead).template head<const T>(row_ahead),
          items, served);
      if (++row_ahead == ahead.rows) {
        row_ahead = 0;
        block_ahead += gridDim.x;
        ahead.move_to<kPath>(rope, geometry, block_ahead);
      }
    }
    rows.commit();
  };
#pragma unroll
  for (int i = 0; i < kBackwardStages; ++i) fetch();
  stage_weights(args, shared_weights);

  uint32_t block = blockIdx.x;
  int row = 0;
  while (exists(lane, block)) {
    const bool served = lane.head(row) < tensor.heads;
    const A rstd =
        served ? rstds[static_cast<int64_t>(lane.token) * tensor.heads + lane.head(row)] : A{};
    if (row == 0) {
      const auto asked = AskedPosition::of<kPath>(rope.positions, lane);
      load_angles<kPath>(rope, lane, asked, items, !rope.inverse, shared_angles, angles);
    }
    A g[kItems][2][V];
    A n[kItems][2][V];
    rows.wait();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rows.get(0, i, g[i]);
      rows.get(1, i, n[i]);
    }
    rows.release();
    fetch();
    A mean = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].turns) angles[i].turn(g[i][0], g[i][1]);
      A weight[2][V];
      load_weight(weights, items[i], weight[0], weight[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          n[i][half][j] *= rstd;
          if constexpr (kWeightGrads) sums[i][half][j] += g[i][half][j] * n[i][half][j];
          g[i][half][j] *= weight[half][j];
        }
        mean += dot(g[i][half], n[i][half]);
      }
    }
    mean = sum_over_group(mean, geometry.log_group) * static_cast<A>(args.mean_factor);
    T* input_grads = Rows::of<kPath>(tensor.out, lane).template head<T>(row);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          g[i][half][j] = rstd * (g[i][half][j] - n[i][half][j] * mean);
        }
      }
      Pair<T, V> done;
      done.set(g[i][0], g[i][1]);
      done.store(input_grads, items[i], served);
    }
    if (++row == lane.rows) {
      row = 0;
      block += gridDim.x;
      lane.move_to<kPath>(rope, geometry, block);
    }
  }
  if (!kWeightGrads || args.partials == nullptr) return;

  // Sum over the groups of a warp, then over the warps of the block, each in a fixed order.
  __syncthreads();                                      // all reads of angles and weights are done
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
      const bool is_query = warp_of_token < geometry.tensors[0].warps;
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

// Add up the partial sums, 32 columns per block: each lane has a column, each warp every 32nd part.
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

bool inputs_are_flat(const QkNormRopeArgs& args) {
  bool flat = true;
  for (int i = 0; i < args.rope.n_tensors; ++i) {
    flat = flat && is_flat(args.norms[i].input_strides, size_of(args.rope.dtype), args.rope);
  }
  return flat;
}

template <typename T, int V, Path kPath>
RopeGeometry backward_geometry(const RopeArgs& rope) {
  using Pipeline = BackwardPipeline<T, V>;
  return rope_geometry(rope, V, kBackwardRows, /*copies=*/true,
                       warps_that_fit<Pipeline, Arithmetic<T>, kPath>(rope));
}

template <typename T>
HeadInputs head_inputs_of(const QkNormRopeArgs& args) {
  HeadInputs inputs;
  for (int i = 0; i < args.rope.n_tensors; ++i) {
    inputs.of[i] = head_memory(args.norms[i].input, args.norms[i].input_strides, sizeof(T));
  }
  return inputs;
}

template <typename T, int V, bool kInterleaved, Path kPath>
void launch_backward(const QkNormRopeArgs& args, Stream stream) {
  using A = Arithmetic<T>;
  const RopeArgs& rope = args.rope;
  const bool frozen = args.partials == nullptr;
  const RopeGeometry geometry = backward_geometry<T, V, kPath>(rope);
  const int head_dim = static_cast<int>(rope.head_dim);
  const size_t rows =
      (angle_elements<A, kPath>(rope, geometry) + padded<A>(2 * head_dim)) * sizeof(A) +
      warps_of(geometry) * BackwardPipeline<T, V>::kWarpBytes;
  const size_t sums = warps_of(geometry) * head_dim * sizeof(A);
  // One instantiation serves frozen and trained weights, except on kDirect, where partial heads and
  // planes need the registers of the sums.
  constexpr bool kBoth = kPath != Path::kDirect;
  const auto kernel = frozen ? qk_norm_rope_backward_kernel<T, V, kInterleaved, kPath, kBoth>
                             : qk_norm_rope_backward_kernel<T, V, kInterleaved, kPath, true>;
  const dim3 grid(static_cast<unsigned>(args.n_partials / geometry.warp_blocks),
                  geometry.warp_blocks);
  kernel<<<grid, threads_of(geometry), std::max(rows, sums), stream>>>(args, geometry,
                                                                       head_inputs_of<T>(args));
  if (frozen) return;
  const auto blocks = static_cast<unsigned>(ceil_div(2 * rope.head_dim, kWarpSize));
  sum_partials_kernel<A><<<blocks, 1024, 0, stream>>>(args);
}

template <typename T, int V>
void launch_plain(const QkNormRopeArgs& args, Stream stream) {
  const RopeGeometry geometry = rope_geometry(args.rope, V, kPlainRows, /*copies=*/false);
  PlainRope plain = plain_rope(args, geometry, !args.rope.inverse);
  const HeadInputs inputs = head_inputs_of<T>(args);
  for (int i = 0; i < 2; ++i) plain.tensors[i].input = plain_heads(inputs.of[i]);
  dispatch_plain<T>(args.rope, [&]<typename Table, PlainSource kSource>() {
    plain_rope_backward_kernel<T, Table, kSource, kPlainRows, kPlainRegisters>
        <<<blocks_of(geometry), threads_of(geometry), 0, stream>>>(plain);
  });
}

// Call run.template operator()<T, V, kInterleaved, kPath>() with vectors that also fit the
// forward's inputs.
template <typename Run>
void dispatch_backward(const QkNormRopeArgs& args, const Run& run) {
  const auto fits = [](int) { return true; };
  const auto plain = [&](int) { return inputs_are_flat(args); };
  dispatch_rope(args.rope, fits, plain, [&]<typename T, int V, bool kInterleaved, Path kPath>() {
    if (inputs_fit(args, V)) {
      run.template operator()<T, V, kInterleaved, kPath>();
    } else {
      run.template operator()<T, 1, false, Path::kStaged>();
    }
  });
}

}  // namespace

// Return the number of blocks that run at a time, times the blocks that share a token. It depends
// only on the shape and the GPU model, so sums are reproducible.
int64_t qk_norm_rope_partials(const QkNormRopeArgs& args) {
  int64_t blocks = 1;
  dispatch_backward(args, [&]<typename T, int V, bool kInterleaved, Path kPath>() {
    const RopeGeometry geometry = backward_geometry<T, V, kPath>(args.rope);
    const int warps = warps_of_registers(kBackwardRegisters<T, V>);
    const int64_t at_a_time = multiprocessors() * std::max(1, warps / warps_of(geometry));
    blocks = std::clamp<int64_t>(geometry.token_blocks, 1, at_a_time) * geometry.warp_blocks;
  });
  return blocks;
}

void apply_qk_norm_rope_backward(const QkNormRopeArgs& args, Stream stream) {
  if (args.partials == nullptr && has_no_work(args.rope)) return;
  dispatch_backward(args, [&]<typename T, int V, bool kInterleaved, Path kPath>() {
    if constexpr (kPath == Path::kPlain) {
      if (args.partials == nullptr && args.weight_dtype == args.rope.dtype &&
          weights_fit(args, V) &&
          is_short(args.rope, V, kPlainRows, kPlainRegisters, kPlainWaves)) {
        return launch_plain<T, V>(args, stream);
      }
    }
    launch_backward<T, V, kInterleaved, kPath>(args, stream);
  });
}

}  // namespace cuseq::cuda
