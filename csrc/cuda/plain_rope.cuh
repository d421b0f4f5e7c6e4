#pragma once

#include <cstdint>

#include "cuda/qk_norm_rope.cuh"

// The rotation of plain calls (is_plain()), with and without norm: nearly all calls of training.
// Short rows take a few microseconds, most of them latency. So the arguments fill few lines of the
// constant cache, the compiler knows where positions come from, and a warp has the loads of all its
// rows in flight at once, in registers. On an H200, with 48 heads of 128 in bf16, that takes 256 to
// 1,024 tokens from 6.4, 8.1 and 10.8 us to 5.9, 7.2 and 10.6, where a copy takes 5.7, 7.3
// and 10.5.
namespace cuseq::cuda {

enum class PlainSource {
  kRow,  // the token's index in the row, plus `first`: one sequence, or a table of tokens
  kIds,
  kSegments,
};

// Heads in memory, [token, head], with strides in bytes.
struct PlainHeads {
  unsigned char* data = nullptr;
  uint32_t token = 0;
  uint32_t head = 0;
};

struct PlainTensor {
  PlainHeads in;
  PlainHeads out;
  int heads = 0;
  int warps = 0;  // per token
  const void* weight = nullptr;
  float* rstd = nullptr;  // [tokens, heads]; null if the forward need not write it
  PlainHeads input;       // of the forward, for the backward
};

struct PlainRope {
  PlainTensor tensors[2];
  uint32_t tokens = 0;
  int log_group = 0;
  const int32_t* positions = nullptr;  // ids or offsets
  int64_t first = 0;                   // kRow
  uint32_t id_words = 0;               // kIds: from one id to the next
  bool ids_are_int64 = false;
  int last_segment = 0;  // kSegments
  const void* cos = nullptr;
  const void* sin = nullptr;
  uint32_t cos_row = 0;  // strides in elements
  uint32_t sin_row = 0;
  int64_t table_rows = 0;  // positions from here on give NaN
  float sign = 1.0f;       // -1 for the inverse rotation
  float eps = 0.0f;        // of norms, as those below
  float mean_factor = 0.0f;
  float weight_offset = 0.0f;
};

inline PlainSource plain_source(const RopeArgs& args) {
  switch (args.positions.source) {
    case PositionSource::kIds:
      return PlainSource::kIds;
    case PositionSource::kSegments:
      return PlainSource::kSegments;
    case PositionSource::kDense:
    case PositionSource::kToken:
      break;
  }
  return PlainSource::kRow;
}

inline PlainHeads plain_heads(const HeadMemory& heads) {
  return {heads.data, static_cast<uint32_t>(heads.token), static_cast<uint32_t>(heads.head)};
}

// Return the arguments of a plain call with the geometry.
inline PlainRope plain_rope(const RopeArgs& args, const RopeGeometry& geometry, bool inverse) {
  const RopePositions& positions = args.positions;
  PlainRope plain;
  for (int i = 0; i < 2; ++i) {
    const TensorPlan& tensor = geometry.tensors[i];
    plain.tensors[i].in = plain_heads(tensor.in);
    plain.tensors[i].out = plain_heads(tensor.out);
    plain.tensors[i].heads = tensor.heads;
    plain.tensors[i].warps = tensor.warps;
  }
  plain.tokens = geometry.tokens;
  plain.log_group = geometry.log_group;
  plain.cos = args.table.cos;
  plain.sin = args.table.sin;
  plain.cos_row = static_cast<uint32_t>(args.table.cos_strides[2]);
  plain.sin_row = static_cast<uint32_t>(args.table.sin_strides[2]);
  plain.table_rows = args.table.rows;
  plain.sign = inverse ? -1.0f : 1.0f;
  switch (positions.source) {
    case PositionSource::kToken:
      plain.table_rows = geometry.tokens;
      break;
    case PositionSource::kDense:
      plain.first = positions.first;
      break;
    case PositionSource::kIds:
      plain.positions = static_cast<const int32_t*>(positions.ids);
      plain.id_words = static_cast<uint32_t>(positions.id_strides[2]) << positions.ids_are_int64;
      plain.ids_are_int64 = positions.ids_are_int64;
      break;
    case PositionSource::kSegments:
      plain.positions = positions.seqlens.cu_seqlens;
      plain.last_segment = static_cast<int>(positions.seqlens.n_seqs);
      break;
  }
  return plain;
}

// Return the arguments of a plain call with norm.
inline PlainRope plain_rope(const QkNormRopeArgs& args, const RopeGeometry& geometry,
                            bool inverse) {
  PlainRope plain = plain_rope(args.rope, geometry, inverse);
  for (int i = 0; i < 2; ++i) {
    plain.tensors[i].weight = args.norms[i].weight;
    plain.tensors[i].rstd = static_cast<float*>(args.norms[i].rstd);
  }
  plain.eps = static_cast<float>(args.eps);
  plain.mean_factor = static_cast<float>(args.mean_factor);
  plain.weight_offset = static_cast<float>(args.weight_offset);
  return plain;
}

// Call run.template operator()<Table, kSource>() for the table's dtype, T or fp32, and the source.
template <typename T, typename Run>
void dispatch_plain(const RopeArgs& args, const Run& run) {
  const auto of_table = [&]<typename Table>() {
    switch (plain_source(args)) {
      case PlainSource::kRow:
        return run.template operator()<Table, PlainSource::kRow>();
      case PlainSource::kIds:
        return run.template operator()<Table, PlainSource::kIds>();
      case PlainSource::kSegments:
        return run.template operator()<Table, PlainSource::kSegments>();
    }
  };
  if (args.table.dtype == FloatType::kFloat32) return of_table.template operator()<float>();
  of_table.template operator()<T>();
}

// Return whether the warps of a plain call run in at most `waves` waves.
inline bool is_short(const RopeArgs& args, int elements, int rows, int registers, int waves) {
  const int64_t warps = warps_needed(args, items_of_head(args, elements, /*copies=*/false), rows);
  return warps <= int64_t{waves} * multiprocessors() * warps_of_registers(registers);
}

// The share of the work of one lane: vectors of V elements of each half of some heads of a token.
template <typename T>
struct PlainLane {
  static constexpr int V = 16 / sizeof(T);
  int lane;
  uint32_t token;
  bool is_key;
  bool works;
  int lane_of_group;
  int heads_per_row;
  int first_head;
  int half;  // elements

  __device__ __forceinline__ static PlainLane of(const PlainRope& args, int rows) {
    PlainLane mine;
    mine.lane = threadIdx.x;
    // The shuffles tell the compiler that the values are the same in all lanes of the warp.
    mine.token = blockIdx.x * blockDim.z + __shfl_sync(kFullWarp, static_cast<int>(threadIdx.z), 0);
    int warp = blockIdx.y * blockDim.y + __shfl_sync(kFullWarp, static_cast<int>(threadIdx.y), 0);
    mine.is_key = warp >= args.tensors[0].warps;
    if (mine.is_key) warp -= args.tensors[0].warps;
    mine.lane_of_group = mine.lane & ((1 << args.log_group) - 1);
    mine.heads_per_row = kWarpSize >> args.log_group;
    const int first = warp * rows * mine.heads_per_row;
    mine.works = mine.token < args.tokens && first < args.tensors[mine.is_key].heads;
    mine.first_head = first + (mine.lane >> args.log_group);
    mine.half = V << args.log_group;
    return mine;
  }

  __device__ __forceinline__ int head(int row) const { return first_head + row * heads_per_row; }

  __device__ __forceinline__ T* at(const PlainHeads& heads, int row) const {
    return reinterpret_cast<T*>(heads.data + wide_product(token, heads.token) +
                                wide_product(head(row), heads.head)) +
           lane_of_group * V;
  }

  __device__ __forceinline__ void load(const T* from, Pair<T, V>& pair) const {
    pair.first = *reinterpret_cast<const Packed<T, V>*>(from);
    pair.second = *reinterpret_cast<const Packed<T, V>*>(from + half);
  }

  __device__ __forceinline__ void store(T* to, const Pair<T, V>& pair) const {
    *reinterpret_cast<Packed<T, V>*>(to) = pair.first;
    *reinterpret_cast<Packed<T, V>*>(to + half) = pair.second;
  }

  // Issue the load of the token's position id; kSegments searches later, in position_of().
  template <PlainSource kSource>
  __device__ __forceinline__ int64_t asked_position(const PlainRope& args) const {
    if constexpr (kSource == PlainSource::kRow) return token + args.first;
    if constexpr (kSource == PlainSource::kSegments) return token;
    const int32_t* id = args.positions + wide_product(token, args.id_words);
    return args.ids_are_int64 ? *reinterpret_cast<const int64_t*>(id) : *id;
  }

  template <PlainSource kSource, typename Table>
  __device__ __forceinline__ void load_angles(const PlainRope& args, int64_t position,
                                              Angles<T, V, false>& angles) const {
    if constexpr (kSource == PlainSource::kSegments) {
      const int segment =
          last_at_most<1>(args.positions, args.last_segment, static_cast<int>(token), lane);
      position -= args.positions[segment];
    }
    const bool exists = static_cast<uint64_t>(position) < static_cast<uint64_t>(args.table_rows);
    const auto row = static_cast<uint32_t>(exists ? position : 0);
    const int column = lane_of_group * V;
    load_vector<V>(static_cast<const Table*>(args.cos) + wide_product(row, args.cos_row) + column,
                   angles.cos);
    load_vector<V>(static_cast<const Table*>(args.sin) + wide_product(row, args.sin_row) + column,
                   angles.sin);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      angles.cos[j] = exists ? angles.cos[j] : NAN;
      angles.sin[j] = exists ? angles.sin[j] * args.sign : NAN;
    }
  }
};

template <typename T, typename Table, PlainSource kSource, bool kNorm, int kRows, int kRegisters>
__global__ void __maxnreg__(kRegisters) plain_rope_kernel(const __grid_constant__ PlainRope args) {
  using Lane = PlainLane<T>;
  constexpr int V = Lane::V;
  const Lane lane = Lane::of(args, kRows);
  if (!lane.works) return;  // uniform in the warp
  const PlainTensor& tensor = args.tensors[lane.is_key];
  const int64_t position = lane.template asked_position<kSource>(args);
  Pair<T, V> rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane.head(r) < tensor.heads) lane.load(lane.at(tensor.in, r), rows[r]);
  }
  Pair<T, V> asked;
  if constexpr (kNorm) {
    lane.load(static_cast<const T*>(tensor.weight) + lane.lane_of_group * V, asked);
  }
  Angles<T, V, false> angles;
  lane.template load_angles<kSource, Table>(args, position, angles);
  WeightedAngles<V, false, float> weighted;
  if constexpr (kNorm) {
    float weight[2][V];
    asked.get(weight[0], weight[1]);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      weight[0][j] += args.weight_offset;
      weight[1][j] += args.weight_offset;
    }
    const Item<V> item{0, 0, 0, true, true, true};
    weighted = WeightedAngles<V, false, float>::of(angles, item, weight);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int head = lane.head(r);
    const bool served = head < tensor.heads;
    float x[2][V];
    rows[r].get(x[0], x[1]);
    if constexpr (kNorm) {
      const float squares = sum_over_group(dot(x[0], x[0]) + dot(x[1], x[1]), args.log_group);
      const float rstd = rsqrt(squares * args.mean_factor + args.eps);
      if (tensor.rstd != nullptr && served && lane.lane_of_group == 0) {
        tensor.rstd[wide_product(lane.token, tensor.heads) + head] = rstd;
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[0][j] *= rstd;
        x[1][j] *= rstd;
      }
      weighted.turn(x, true);
    } else {
      angles.turn(x[0], x[1]);
    }
    rows[r].set(x[0], x[1]);
    if (served) lane.store(lane.at(tensor.out, r), rows[r]);
  }
}

// The backward with norm, for weights that are not trained. See qk_norm_rope_backward_kernel.
template <typename T, typename Table, PlainSource kSource, int kRows, int kRegisters>
__global__ void __maxnreg__(kRegisters)
    plain_rope_backward_kernel(const __grid_constant__ PlainRope args) {
  using Lane = PlainLane<T>;
  constexpr int V = Lane::V;
  const Lane lane = Lane::of(args, kRows);
  if (!lane.works) return;  // uniform in the warp
  const PlainTensor& tensor = args.tensors[lane.is_key];
  const int64_t position = lane.template asked_position<kSource>(args);
  Pair<T, V> grads[kRows];
  Pair<T, V> inputs[kRows];
  float rstds[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane.head(r) < tensor.heads) {
      lane.load(lane.at(tensor.in, r), grads[r]);
      lane.load(lane.at(tensor.input, r), inputs[r]);
      rstds[r] = tensor.rstd[wide_product(lane.token, tensor.heads) + lane.head(r)];
    }
  }
  Pair<T, V> asked;
  lane.load(static_cast<const T*>(tensor.weight) + lane.lane_of_group * V, asked);
  Angles<T, V, false> angles;
  lane.template load_angles<kSource, Table>(args, position, angles);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float g[2][V], n[2][V], weight[2][V];
    grads[r].get(g[0], g[1]);
    inputs[r].get(n[0], n[1]);
    asked.get(weight[0], weight[1]);
    angles.turn(g[0], g[1]);
    float mean = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        n[half][j] *= rstds[r];
        g[half][j] *= weight[half][j] + args.weight_offset;
      }
      mean += dot(g[half], n[half]);
    }
    mean = sum_over_group(mean, args.log_group) * args.mean_factor;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < V; ++j) g[half][j] = rstds[r] * (g[half][j] - n[half][j] * mean);
    }
    grads[r].set(g[0], g[1]);
    if (lane.head(r) < tensor.heads) lane.store(lane.at(tensor.out, r), grads[r]);
  }
}

}  // namespace cuseq::cuda
