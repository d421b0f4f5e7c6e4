#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/rope_lanes.cuh"
#include "cuda/warp_search.cuh"

// The cosines and sines of a token: where its row of the table is, and how lanes load it.
namespace cuseq::cuda {

// A token's position id, still unconverted. Angles take two dependent loads, first the token's
// position, then its row of the table. So a kernel issues the load of the position before all
// others and calls get(), which waits for it, after all others.
struct AskedPosition {
  int32_t low = 0;
  int32_t high = 0;

  template <Path kPath>
  __device__ __forceinline__ static AskedPosition of(const RopePositions& positions,
                                                     const Lane& lane) {
    AskedPosition asked;
    if (kPath != Path::kPlain || positions.source != PositionSource::kIds) return asked;
    const auto* words = static_cast<const int32_t*>(positions.ids);
    const uint64_t i = wide_product(lane.token, static_cast<uint32_t>(positions.id_strides[2]));
    if (positions.ids_are_int64) {
      asked.low = words[2 * i];
      asked.high = words[2 * i + 1];
    } else {
      asked.low = words[i];
    }
    return asked;
  }

  __device__ __forceinline__ int64_t get(const RopePositions& positions) const {
    if (!positions.ids_are_int64) return low;
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
                                static_cast<uint32_t>(low));
  }
};

// The offsets of a token's row in the table, for one plane.
struct TableRow {
  int64_t cos;
  int64_t sin;
  bool exists;  // whether the table has a row for the position

  template <Path kPath>
  __device__ __forceinline__ static TableRow of(const RopeArgs& args, const Lane& lane,
                                                const AskedPosition& asked, int plane) {
    constexpr bool kPlain = kPath == Path::kPlain;
    const RopePositions& positions = args.positions;
    const RopeTable& table = args.table;
    int64_t position = lane.token_in_batch;
    if (positions.source == PositionSource::kSegments) {
      const SeqLens& seqlens = positions.seqlens;
      const auto token = static_cast<int>(kPlain ? lane.token : lane.token * positions.cp_size);
      const int segment = segment_of_warp(seqlens, token, lane.lane);
      position =
          kPlain ? token - seqlens.begin(segment) : positions.in_segment(lane.token, segment);
    } else if (positions.source == PositionSource::kIds) {
      position = kPlain ? asked.get(positions) : positions.given(plane, lane.batch, position);
    } else if (positions.source == PositionSource::kDense) {
      position = kPlain ? position + positions.first : positions.dense(position);
    }
    const bool is_token = positions.source == PositionSource::kToken;
    const bool exists =
        is_token || static_cast<uint64_t>(position) < static_cast<uint64_t>(table.rows);
    // A table indexed by position is shared by all planes and batches, so those strides are 0.
    const auto row = static_cast<uint32_t>(exists ? position : 0);
    const auto offset = [&](int64_t stride) {
      return kPlain ? static_cast<int64_t>(wide_product(row, static_cast<uint32_t>(stride)))
                    : row * stride;
    };
    TableRow found{offset(table.cos_strides[2]), offset(table.sin_strides[2]), exists};
    if (!kPlain && is_token) {
      found.cos += plane * table.cos_strides[0] + lane.batch * table.cos_strides[1];
      found.sin += plane * table.sin_strides[0] + lane.batch * table.sin_strides[1];
    }
    return found;
  }

  __device__ __forceinline__ TableRow of_lane(int lane) const {
    return {__shfl_sync(kFullWarp, cos, lane), __shfl_sync(kFullWarp, sin, lane),
            static_cast<bool>(__shfl_sync(kFullWarp, static_cast<int>(exists), lane))};
  }
};

template <typename Table, typename A>
__device__ __forceinline__ void stage_pair(const RopeArgs& args, const TableRow& row, int pair,
                                           bool inverse, A* shared_cos, A* shared_sin) {
  const int64_t column = pair * static_cast<int>(args.table.column_step);
  A cos = static_cast<A>(NAN);
  A sin = static_cast<A>(NAN);
  if (row.exists) {
    cos = convert<A>(static_cast<const Table*>(args.table.cos)[row.cos + column]);
    sin = convert<A>(static_cast<const Table*>(args.table.sin)[row.sin + column]);
  }
  shared_cos[pair] = cos;
  shared_sin[pair] = inverse ? -sin : sin;
}

// Write the cosines and sines of a warp's token to shared memory, [rotary_dim / 2] each; with
// `inverse`, those of the inverse rotation. A position outside the table gives NaN, so that the
// error shows and no memory outside the table is read. Lane number p passes the row of plane p.
template <typename A>
__device__ __forceinline__ void stage_angles(const RopeArgs& args, const Lane& lane,
                                             const TableRow& row, bool inverse, A* shared_cos,
                                             A* shared_sin) {
  const int pairs = static_cast<int>(args.rotary_dim) / 2;
  const bool one_plane = args.planes.kind == Planes::kOne;
  __syncwarp();  // all lanes have read the previous token's angles
  dispatch_float(args.table.dtype, [&]<typename Table>() {
#pragma unroll 1
    for (int first = 0; first < pairs; first += kWarpSize) {
      const int pair = first + lane.lane;
      const TableRow own = one_plane ? row : row.of_lane(args.planes.plane_of(pair));
      if (pair < pairs) stage_pair<Table>(args, own, pair, inverse, shared_cos, shared_sin);
    }
  });
  __syncwarp();
}

// The angles of one item's pairs.
template <typename T, int V, bool kInterleaved>
struct Angles {
  using A = Arithmetic<T>;
  A cos[V] = {};
  A sin[V] = {};

  // Load the angles of the item's pairs; `cosines` and `sines` point to the token's first pair.
  template <typename Source>
  __device__ __forceinline__ void load(const Source* cosines, const Source* sines,
                                       const Item<V>& item, const RopeArgs& args) {
    if constexpr (kInterleaved) {
      // Each vector holds V / 2 pairs.
      constexpr int kHalf = V / 2;
      const int first = item.index * kHalf;
      const int second = first + static_cast<int>(args.rotary_dim) / 4;
      load_vector<kHalf>(cosines + first, cos);
      load_vector<kHalf>(cosines + second, cos + kHalf);
      load_vector<kHalf>(sines + first, sin);
      load_vector<kHalf>(sines + second, sin + kHalf);
    } else {
      load_vector<V>(cosines + item.index * V, cos);
      load_vector<V>(sines + item.index * V, sin);
    }
  }

  template <typename Table>
  __device__ __forceinline__ void load_row(const TableRow& row, const Item<V>& item,
                                           const RopeArgs& args) {
    load(static_cast<const Table*>(args.table.cos) + row.cos,
         static_cast<const Table*>(args.table.sin) + row.sin, item, args);
  }

  __device__ __forceinline__ void load_row(const TableRow& row, const Item<V>& item, bool inverse,
                                           const RopeArgs& args) {
    if (!std::is_same_v<T, A> && args.table.dtype == FloatType::kFloat32) {
      load_row<A>(row, item, args);
    } else {
      load_row<T>(row, item, args);
    }
    if (!row.exists) {
#pragma unroll
      for (int i = 0; i < V; ++i) cos[i] = sin[i] = static_cast<A>(NAN);
    }
    if (inverse) {
#pragma unroll
      for (int i = 0; i < V; ++i) sin[i] = -sin[i];
    }
  }

  __device__ __forceinline__ void turn(A (&first)[V], A (&second)[V]) const {
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        turn_pair(first[2 * i], first[2 * i + 1], cos[i], sin[i]);
        turn_pair(second[2 * i], second[2 * i + 1], cos[V / 2 + i], sin[V / 2 + i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) turn_pair(first[i], second[i], cos[i], sin[i]);
    }
  }

  __device__ __forceinline__ static void turn_pair(A& a, A& b, A c, A s) {
    const A x = a;
    const A y = b;
    // Explicit fma: the compiler may fuse differently in each kernel, and results would differ.
    a = fma(x, c, -(y * s));
    b = fma(y, c, x * s);
  }
};

// Load the angles of a lane's items. On kStaged, `shared` has room for the angles of all warps of
// the block. All lanes of the warp must call it.
template <Path kPath, typename T, int V, bool kInterleaved, int kItems>
__device__ __forceinline__ void load_angles(const RopeArgs& args, const Lane& lane,
                                            const AskedPosition& asked,
                                            const Item<V> (&items)[kItems], bool inverse,
                                            Arithmetic<T>* shared,
                                            Angles<T, V, kInterleaved> (&angles)[kItems]) {
  const bool one_plane = kPath == Path::kPlain || args.planes.kind == Planes::kOne;
  if constexpr (kPath != Path::kStaged) {
    TableRow row{};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i == 0 || !one_plane) {
        const int plane = one_plane ? 0 : args.planes.plane_of(items[i].index * V);
        row = TableRow::of<kPath>(args, lane, asked, plane);
      }
      if (items[i].turns) angles[i].load_row(row, items[i], inverse, args);
    }
  } else {
    const int rotary_dim = static_cast<int>(args.rotary_dim);
    Arithmetic<T>* cosines = shared + lane.warp * rotary_dim;
    Arithmetic<T>* sines = cosines + rotary_dim / 2;
    // Lane 0 finds the row of time, lane 1 that of height, the others that of width.
    const TableRow row = TableRow::of<kPath>(args, lane, asked, one_plane ? 0 : min(lane.lane, 2));
    stage_angles(args, lane, row, inverse, cosines, sines);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].turns) angles[i].load(cosines, sines, items[i], args);
    }
  }
}

}  // namespace cuseq::cuda
