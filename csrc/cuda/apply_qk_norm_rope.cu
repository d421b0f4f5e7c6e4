#include <algorithm>

#include "cuda/plain_rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows per warp, rows in flight, and registers per thread. The registers for 16-bit types in wide
// vectors were measured on an H200; the others are as many as avoid spilling.
constexpr int kForwardRows = 5;  // at most
constexpr int kForwardStages = 3;
template <typename T, int V, Path kPath>
inline constexpr int kForwardRegisters =
    sizeof(T) == 8 ? 168 : (V < 4 ? 128 : (kPath == Path::kPlain ? 64 : 80));

// Rows and registers of plain calls whose warps run in a few waves; more waves fill the pipeline.
constexpr int kPlainRows = 2;
constexpr int kPlainRegisters = 80;
constexpr int kPlainWaves = 4;

// Load an item's weights from memory and add weight_offset. A vector that does not exist gets
// arbitrary weights. kInVectors requires weights of type T or fp32.
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

// An item's weights of type T, still unconverted. The item must exist. of() issues the loads; call
// get() only after all other loads were issued, because it waits for them.
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

template <typename T, int V>
using ForwardPipeline = RowPipeline<T, V, 1, kForwardStages>;
template <typename T, int V, bool kInterleaved, Path kPath>
__global__ void __maxnreg__((kForwardRegisters<T, V, kPath>))
    qk_norm_rope_kernel(const __grid_constant__ QkNormRopeArgs args,
                        const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const RopeArgs& rope = args.rope;
  const Lane lane = Lane::of<kPath>(rope, geometry, blockIdx.x);
  if (lane.token >= geometry.tokens || lane.rows <= 0) return;  // uniform in the warp
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
      load_angles<kPath>(rope, lane, asked, items, rope.inverse, shared_angles, angles);
      asked_weight.get(static_cast<A>(args.weight_offset), weight[0]);
    } else {
      load_angles<kPath>(rope, lane, asked, items, rope.inverse, shared_angles, angles);
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

// Return the rows per warp: the fewest with which all warps run at a time. If that takes more than
// kForwardRows, return as many as give the warps of the tensor with more heads equal work.
int forward_rows(const RopeArgs& rope, int elements, int registers) {
  const int items = items_of_head(rope, elements, /*copies=*/true);
  const int rows = rows_of_one_wave(rope, items, warps_of_registers(registers), kForwardRows);
  if (rows > 0) return rows;
  const int64_t heads = std::max(rope.tensors[0].heads, rope.tensors[1].heads);
  const int64_t all = ceil_div(heads, kWarpSize >> log_group_of(items));
  return static_cast<int>(ceil_div(all, ceil_div(all, kForwardRows)));
}

template <typename T, int V>
void launch_plain(const QkNormRopeArgs& args, Stream stream) {
  const RopeGeometry geometry = rope_geometry(args.rope, V, kPlainRows, /*copies=*/false);
  const PlainRope plain = plain_rope(args, geometry, args.rope.inverse);
  dispatch_plain<T>(args.rope, [&]<typename Table, PlainSource kSource>() {
    plain_rope_kernel<T, Table, kSource, /*kNorm=*/true, kPlainRows, kPlainRegisters>
        <<<blocks_of(geometry), threads_of(geometry), 0, stream>>>(plain);
  });
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
    if constexpr (kPath == Path::kPlain) {
      if (is_short(rope, V, kPlainRows, kPlainRegisters, kPlainWaves)) {
        return launch_plain<T, V>(args, stream);
      }
    }
    const int rows = forward_rows(rope, V, kForwardRegisters<T, V, kPath>);
    const RopeGeometry geometry =
        rope_geometry(rope, V, rows, /*copies=*/true, warps_that_fit<Pipeline, A, kPath>(rope));
    const size_t shared = angle_elements<A, kPath>(rope, geometry) * sizeof(A) +
                          warps_of(geometry) * Pipeline::kWarpBytes;
    qk_norm_rope_kernel<T, V, kInterleaved, kPath>
        <<<blocks_of(geometry), threads_of(geometry), shared, stream>>>(args, geometry);
  });
}

}  // namespace cuseq::cuda
