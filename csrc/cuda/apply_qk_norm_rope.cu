#include <cuda_pipeline.h>

#include <algorithm>

#include "cuda/rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows of a warp, rows on their way at a time, and registers of a thread: measured on an H200 for
// 16 bits in wide vectors, elsewhere as many as do not spill. The backward keeps its warps to the
// end, so few rows each share the work out evenly.
constexpr int kForwardRows = 5;  // at most
constexpr int kForwardStages = 3;
template <typename T, int V, Path kPath>
inline constexpr int kForwardRegisters =
    sizeof(T) == 8 ? 168 : (V < 4 ? 128 : (kPath == Path::kPlain ? 64 : 80));

constexpr int kBackwardRows = 2;
constexpr int kBackwardStages = 2;
template <typename T, int V>
inline constexpr int kBackwardRegisters =
    sizeof(T) == 8 ? 255 : (V == 8 ? 96 : (V == 4 ? 128 : 168));

// Of frozen weights, where is_plain() holds: one row a warp, in blocks of so many warps, as long as
// so many waves of them do. Warps that stay until the end read memory in a better order.
constexpr int kFrozenWarps = 2;
constexpr int kFrozenRegisters = 64;
constexpr int kFrozenWaves = 20;

// Rows on their way into shared memory, kStages of them, each from kSources tensors. A lane waits
// for nothing but what it asked for itself. Registers could hold no more than one row.
template <typename T, int V, int kSources, int kStages>
class RowPipeline {
 public:
  static constexpr int kItems = kItemsPerLane<V>;
  static constexpr int kVectors = kSources * kItems * 2;  // of a lane in a stage
  static constexpr int kWarpBytes = kStages * kVectors * kWarpSize * V * sizeof(T);

  __device__ __forceinline__ RowPipeline(unsigned char* shared, const Lane& lane)
      : slots_(reinterpret_cast<Vector*>(shared + lane.warp * kWarpBytes) + lane.lane) {}

  // Asks for the items of one head, zeros where there are none.
  __device__ __forceinline__ void fetch(int source, const T* head, const Item<V> (&items)[kItems],
                                        bool served) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      fetch_vector(slot(in_, source, i, 0), head + items[i].first, served && items[i].first_exists);
      fetch_vector(slot(in_, source, i, 1), head + items[i].second,
                   served && items[i].second_exists);
    }
  }

  // Ends a row, which may be empty.
  __device__ __forceinline__ void commit() {
    __pipeline_commit();
    in_ = next(in_);
  }

  // Waits for the oldest row. No thread waits for another, so nothing else keeps the reads behind
  // it.
  __device__ __forceinline__ void wait() {
    __pipeline_wait_prior(kStages - 1);
    asm volatile("" ::: "memory");
  }

  template <typename A>
  __device__ __forceinline__ void get(int source, int item, A (&x)[2][V]) const {
    slot(out_, source, item, 0)->get(x[0]);
    slot(out_, source, item, 1)->get(x[1]);
  }

  // Gives the oldest row's place back.
  __device__ __forceinline__ void release() { out_ = next(out_); }

 private:
  using Vector = Packed<T, V>;

  __device__ __forceinline__ static int next(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }

  __device__ __forceinline__ Vector* slot(int stage, int source, int item, int half) const {
    return slots_ + (stage * kVectors + (source * kItems + item) * 2 + half) * kWarpSize;
  }

  __device__ __forceinline__ static void fetch_vector(Vector* slot, const T* source, bool exists) {
    if constexpr (sizeof(Vector) >= 4) {
      __pipeline_memcpy_async(slot, source, sizeof(Vector), exists ? 0 : sizeof(Vector));
    } else {
      *slot = exists ? *reinterpret_cast<const Vector*>(source) : Vector{};
    }
  }

  Vector* slots_;
  int in_ = 0;
  int out_ = 0;
};

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
  load_vector<V>(shared_weight + (item.first_exists ? item.first : 0), first);
  load_vector<V>(shared_weight + (item.second_exists ? item.second : 0), second);
}

// The same from memory, with weight_offset. In vectors, weights are of type T or fp32.
template <bool kInVectors, typename T, int V, typename A>
__device__ __forceinline__ void load_weight(const QkNormRopeArgs& args, const void* weight,
                                            const Item<V>& item, A (&first)[V], A (&second)[V]) {
  const int at_first = item.first_exists ? item.first : 0;
  const int at_second = item.second_exists ? item.second : 0;
  if constexpr (kInVectors) {
    const auto load = [&]<typename Weight>(const Weight* all) {
      load_vector<V>(all + at_first, first);
      load_vector<V>(all + at_second, second);
    };
    if (!std::is_same_v<T, float> && args.weight_dtype == FloatType::kFloat32) {
      load(static_cast<const float*>(weight));
    } else {
      load(static_cast<const T*>(weight));
    }
  } else {
    dispatch_float(args.weight_dtype, [&]<typename Weight>() {
      const auto* all = static_cast<const Weight*>(weight);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        first[j] = convert<A>(all[at_first + j]);
        second[j] = convert<A>(all[at_second + j]);
      }
    });
  }
  const auto offset = static_cast<A>(args.weight_offset);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    first[j] += offset;
    second[j] += offset;
  }
}

// The weights under an item that exists, as they come from memory, of type T: to be looked at once
// everything else has been asked for.
template <typename T, int V>
struct AskedWeight {
  Packed<T, V> first;
  Packed<T, V> second;

  __device__ __forceinline__ static AskedWeight of(const void* weight, const Item<V>& item) {
    const T* all = static_cast<const T*>(weight);
    return {*reinterpret_cast<const Packed<T, V>*>(all + item.first),
            *reinterpret_cast<const Packed<T, V>*>(all + item.second)};
  }

  template <typename A>
  __device__ __forceinline__ void get(A offset, A (&weight)[2][V]) const {
    first.get(weight[0]);
    second.get(weight[1]);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      weight[0][j] += offset;
      weight[1][j] += offset;
    }
  }
};

// Weights and angles of one item in one: y = x * own + partner * cross, where the partner is the
// other element of the pair.
template <int V, bool kInterleaved, typename A>
struct WeightedAngles {
  A own[2][V];
  A cross[2][V];

  template <typename T>
  __device__ __forceinline__ static WeightedAngles of(const Angles<T, V, kInterleaved>& angles,
                                                      const Item<V>& item,
                                                      const A (&weight)[2][V]) {
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

// What the backward reads beside gradients.
struct HeadInputs {
  HeadMemory of[2];
};

template <typename T, int V>
using ForwardPipeline = RowPipeline<T, V, 1, kForwardStages>;
template <typename T, int V>
using BackwardPipeline = RowPipeline<T, V, 2, kBackwardStages>;

template <typename T, int V, bool kInterleaved, Path kPath>
__global__ void __maxnreg__((kForwardRegisters<T, V, kPath>))
    qk_norm_rope_kernel(const __grid_constant__ QkNormRopeArgs args,
                        const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const RopeArgs& rope = args.rope;
  const Lane lane = Lane::of<kPath>(rope, geometry, blockIdx.x);
  if (lane.token >= geometry.tokens || lane.rows <= 0) return;  // the whole warp
  const auto asked = AskedPosition::of<kPath>(rope.positions, lane);

  Item<V> items[kItems];
  find_items<kPath>(lane.lane_of_group, rope, geometry, items);
  const TensorPlan& tensor = geometry.tensors[lane.tensor];
  const Rows inputs = Rows::of<kPath>(tensor.in, lane);
  const Rows outputs = Rows::of<kPath>(tensor.out, lane);
  A* shared_angles = reinterpret_cast<A*>(shared_memory);
  ForwardPipeline<T, V> rows(shared_memory + angle_elements<A, kPath>(rope, geometry) * sizeof(A),
                             lane);
  const auto fetch = [&](int row) {
    if (row < lane.rows) {
      rows.fetch(0, inputs.head<const T>(row), items, lane.head(row) < tensor.heads);
    }
    rows.commit();
  };

#pragma unroll
  for (int row = 0; row < kForwardStages; ++row) fetch(row);
  WeightedAngles<V, kInterleaved, A> weighted[kItems];
  {
    const void* weights = args.norms[lane.tensor].weight;
    A weight[kItems][2][V];
    Angles<T, V, kInterleaved> angles[kItems];
    if constexpr (kPath == Path::kPlain) {
      const auto asked_weight = AskedWeight<T, V>::of(weights, items[0]);
      load_angles<kPath>(rope, lane, asked, items, rope.conjugate, shared_angles, angles);
      asked_weight.get(static_cast<A>(args.weight_offset), weight[0]);
    } else {
      load_angles<kPath>(rope, lane, asked, items, rope.conjugate, shared_angles, angles);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        load_weight<kPath == Path::kDirect, T>(args, weights, items[i], weight[i][0], weight[i][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      weighted[i] = WeightedAngles<V, kInterleaved, A>::of(angles[i], items[i], weight[i]);
    }
  }
  A* rstds = static_cast<A*>(args.norms[lane.tensor].rstd);
  if (rstds != nullptr) rstds += static_cast<int64_t>(lane.token) * tensor.heads;
#pragma unroll 1
  for (int row = 0; row < lane.rows; ++row) {
    A x[kItems][2][V];
    rows.wait();
#pragma unroll
    for (int i = 0; i < kItems; ++i) rows.get(0, i, x[i]);
    rows.release();
    fetch(row + kForwardStages);
    A squares = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) squares += dot(x[i][0], x[i][0]) + dot(x[i][1], x[i][1]);
    squares = sum_over_group(squares, geometry.log_group);
    const A rstd = rsqrt(squares * static_cast<A>(args.mean_factor) + static_cast<A>(args.eps));
    const int head = lane.head(row);
    const bool served = head < tensor.heads;
    if (rstds != nullptr && served && lane.lane_of_group == 0) rstds[head] = rstd;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[i][0][j] *= rstd;
        x[i][1][j] *= rstd;
      }
      weighted[i].turn(x[i], items[i].turns);
      Pair<T, V> done;
      done.set(x[i][0], x[i][1]);
      done.store(outputs.head<T>(row), items[i], served);
    }
  }
}

// With n = x * rstd, y = turn(n * w): for g = turn back(dy) * w,
//   dx = rstd * (g - n * mean(g * n)),  dw = sum over tokens and heads of turn back(dy) * n.
// A fixed grid walks the tokens, and each block writes its part of dw: sums have one order,
// whatever runs first. Without kWeightGrads there is no dw, as where weights are frozen.
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

  // The rows of this warp's tokens, one after the other. `ahead` is the row that is asked for next.
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
      load_angles<kPath>(rope, lane, asked, items, !rope.conjugate, shared_angles, angles);
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
      const bool is_query = warp_of_token < geometry.tensors[0].warps;
      if (is_query == of_query) sum += block_sums[warp * head_dim + column];
    }
    partial[i] = sum;
  }
}

// dx of the same, of frozen weights: no sums, so a warp has one row and is done.
template <typename T, int V>
__global__ void __maxnreg__(kFrozenRegisters)
    qk_norm_rope_frozen_backward_kernel(const __grid_constant__ QkNormRopeArgs args,
                                        const __grid_constant__ RopeGeometry geometry,
                                        const __grid_constant__ HeadInputs head_inputs) {
  using A = Arithmetic<T>;
  constexpr Path kPath = Path::kPlain;
  const RopeArgs& rope = args.rope;
  const Lane lane = Lane::of<kPath>(rope, geometry, blockIdx.x);
  if (lane.token >= geometry.tokens || lane.rows <= 0) return;  // the whole warp
  const auto asked = AskedPosition::of<kPath>(rope.positions, lane);

  Item<V> items[1];
  find_items<kPath>(lane.lane_of_group, rope, geometry, items);
  const Item<V>& item = items[0];
  const TensorPlan& tensor = geometry.tensors[lane.tensor];
  const HeadNorm& norm = args.norms[lane.tensor];
  const int head = lane.head(0);
  const bool served = head < tensor.heads;
  Pair<T, V> gradient;
  Pair<T, V> input;
  gradient.load(Rows::of<kPath>(tensor.in, lane).template head<const T>(0), item, served);
  input.load(Rows::of<kPath>(head_inputs.of[lane.tensor], lane).template head<const T>(0), item,
             served);
  const int64_t first_head = static_cast<int64_t>(lane.token) * tensor.heads;
  const A rstd = served ? static_cast<const A*>(norm.rstd)[first_head + head] : A{};
  const auto asked_weight = AskedWeight<T, V>::of(norm.weight, item);
  Angles<T, V, false> angles[1];
  load_angles<kPath>(rope, lane, asked, items, !rope.conjugate, static_cast<A*>(nullptr), angles);
  A weight[2][V];
  asked_weight.get(static_cast<A>(args.weight_offset), weight);

  A g[2][V];
  A n[2][V];
  gradient.get(g[0], g[1]);
  input.get(n[0], n[1]);
  angles[0].turn(g[0], g[1]);
  A mean = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      n[half][j] *= rstd;
      g[half][j] *= weight[half][j];
    }
    mean += dot(g[half], n[half]);
  }
  mean = sum_over_group(mean, geometry.log_group) * static_cast<A>(args.mean_factor);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < V; ++j) g[half][j] = rstd * (g[half][j] - n[half][j] * mean);
  }
  Pair<T, V> done;
  done.set(g[0], g[1]);
  done.store(Rows::of<kPath>(tensor.out, lane).template head<T>(0), item, served);
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

// Whether lanes can read weights in vectors of so many.
bool weights_fit(const QkNormRopeArgs& args, int elements) {
  const int64_t bytes = std::min(16, elements * size_of(args.weight_dtype));
  return (args.weight_dtype == args.rope.dtype || args.weight_dtype == FloatType::kFloat32) &&
         multiple_of(args.norms[0].weight, bytes) && multiple_of(args.norms[1].weight, bytes);
}

bool inputs_are_flat(const QkNormRopeArgs& args) {
  bool flat = true;
  for (int i = 0; i < args.rope.n_tensors; ++i) {
    flat = flat && is_flat(args.norms[i].input_strides, size_of(args.rope.dtype), args.rope);
  }
  return flat;
}

// Warps of a block whose rows fit into the shared memory of any GPU, with their angles and with
// both weights beside them.
template <typename Pipeline, typename A, Path kPath>
int warps_that_fit(const RopeArgs& rope) {
  const auto head_dim = static_cast<int>(rope.head_dim);
  const int64_t room = 48 * 1024 - padded<A>(2 * head_dim) * sizeof(A);
  const int64_t of_warp =
      Pipeline::kWarpBytes +
      (kPath != Path::kStaged ? 0 : padded<A>(static_cast<int>(rope.rotary_dim)) * sizeof(A));
  return static_cast<int>(std::clamp<int64_t>(room / of_warp, 1, kMaxWarps));
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

// Whether a kernel without sums is the faster one.
bool is_short_and_frozen(const QkNormRopeArgs& args, int elements) {
  const RopeArgs& rope = args.rope;
  const int64_t room =
      static_cast<int64_t>(multiprocessors()) * warps_of_registers(kFrozenRegisters);
  const int items = items_of_head(rope, elements, /*copies=*/false);
  return args.partials == nullptr && args.weight_dtype == rope.dtype &&
         weights_fit(args, elements) && warps_needed(rope, items, 1) <= kFrozenWaves * room;
}

template <typename T, int V>
void launch_frozen_backward(const QkNormRopeArgs& args, Stream stream) {
  if (has_no_work(args.rope)) return;
  const RopeGeometry geometry =
      rope_geometry(args.rope, V, /*rows=*/1, /*copies=*/false, kFrozenWarps);
  qk_norm_rope_frozen_backward_kernel<T, V>
      <<<blocks_of(geometry), threads_of(geometry), 0, stream>>>(args, geometry,
                                                                 head_inputs_of<T>(args));
}

template <typename T, int V, bool kInterleaved, Path kPath>
void launch_backward(const QkNormRopeArgs& args, Stream stream) {
  using A = Arithmetic<T>;
  const RopeArgs& rope = args.rope;
  const bool frozen = args.partials == nullptr;
  if constexpr (kPath == Path::kPlain) {
    if (is_short_and_frozen(args, V)) return launch_frozen_backward<T, V>(args, stream);
  }
  const RopeGeometry geometry = backward_geometry<T, V, kPath>(rope);
  const int head_dim = static_cast<int>(rope.head_dim);
  const size_t rows =
      (angle_elements<A, kPath>(rope, geometry) + padded<A>(2 * head_dim)) * sizeof(A) +
      warps_of(geometry) * BackwardPipeline<T, V>::kWarpBytes;
  const size_t sums = warps_of(geometry) * head_dim * sizeof(A);
  // One kernel serves both, but where partial heads and planes take its registers.
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

// As few rows as let all warps run at a time; where that takes too many, as many as make the warps
// of the tensor with more heads alike.
int forward_rows(const RopeArgs& rope, int elements, int registers) {
  const int items = items_of_head(rope, elements, /*copies=*/true);
  const int rows = rows_of_one_wave(rope, items, warps_of_registers(registers), kForwardRows);
  if (rows > 0) return rows;
  const int64_t heads = std::max(rope.tensors[0].heads, rope.tensors[1].heads);
  const int64_t all = ceil_div(heads, kWarpSize >> log_group_of(items));
  return static_cast<int>(ceil_div(all, ceil_div(all, kForwardRows)));
}

}  // namespace

void apply_qk_norm_rope(const QkNormRopeArgs& args, Stream stream) {
  const RopeArgs& rope = args.rope;
  if (has_no_work(rope)) return;
  const auto fits = [&](int elements) { return weights_fit(args, elements); };
  const auto plain = [&](int) { return args.weight_dtype == rope.dtype; };
  dispatch_rope(rope, fits, plain, [&]<typename T, int V, bool kInterleaved, Path kPath>() {
    using A = Arithmetic<T>;
    using Pipeline = ForwardPipeline<T, V>;
    const int rows = forward_rows(rope, V, kForwardRegisters<T, V, kPath>);
    const RopeGeometry geometry =
        rope_geometry(rope, V, rows, /*copies=*/true, warps_that_fit<Pipeline, A, kPath>(rope));
    const size_t shared = angle_elements<A, kPath>(rope, geometry) * sizeof(A) +
                          warps_of(geometry) * Pipeline::kWarpBytes;
    qk_norm_rope_kernel<T, V, kInterleaved, kPath>
        <<<blocks_of(geometry), threads_of(geometry), shared, stream>>>(args, geometry);
  });
}

// Calls run.template operator()<T, V, kInterleaved, kPath>() with vectors that fit the inputs
// too.
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

// Blocks that run at a time, for each of the blocks that share a token: the same for one shape on
// one kind of GPU, so that sums have one order.
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
  dispatch_backward(args, [&]<typename T, int V, bool kInterleaved, Path kPath>() {
    launch_backward<T, V, kInterleaved, kPath>(args, stream);
  });
}

}  // namespace cuseq::cuda
