#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/launch.cuh"
#include "kernels/rope.h"

// Shared by the rotations with and without norm. A warp serves heads of q or of k of one token; a
// group of its lanes serves one head at a time, so that angles are read once and turn many heads:
//
//   warp:   |  head 0  |  head 1  |  head 2  |  head 3  |   then heads 4 to 7, ...
//   lane:    0 1 .. 7   8 .. 15    16 .. 23   24 .. 31      (head_dim 128 in bf16)
//   lane l of a group holds 16 bytes of each half of the rotated part, which pair up.
//
// Instructions per warp, not memory, are what these kernels would be bound by: whatever the host
// can work out lies in RopeGeometry, and a lane reads its own angles from the table, 16 bytes at a
// time. Tables that do not allow it go through shared memory, which each warp fills for its token.
namespace cuseq::cuda {

// What a kernel takes for granted. Each is a kernel of its own: code that is not run costs time
// too, it lies between and takes registers.
enum class Path {
  kStaged,  // nothing; angles go through shared memory
  kDirect,  // lanes read angles, and what else the kernel reads, in vectors of their own
  kPlain,   // and as is_plain() says
};

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T values[N];
};

template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<From, __half>) {
    return static_cast<To>(__half2float(value));
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

// Calls run.template operator()<T>() for the dtype.
template <typename Run>
__device__ __forceinline__ void dispatch_float(FloatType type, const Run& run) {
  switch (type) {
    case FloatType::kFloat32:
      return run.template operator()<float>();
    case FloatType::kFloat64:
      return run.template operator()<double>();
    case FloatType::kBFloat16:
      return run.template operator()<__nv_bfloat16>();
    case FloatType::kFloat16:
      return run.template operator()<__half>();
  }
}

// Neighbours as they lie in memory, in whole words: single 16-bit values would each be cut out and
// put back.
template <typename T, int V>
struct Packed {
  using Word = std::conditional_t<sizeof(T) * V % 4 == 0, uint32_t, uint16_t>;
  static constexpr int kWords = sizeof(T) * V / sizeof(Word);
  Vec<Word, kWords> words = {};

  template <typename A>
  __device__ __forceinline__ void get(A (&out)[V]) const {
    if constexpr (sizeof(T) == 2 && V > 1) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        const float2 two = unpack(words.values[i]);
        out[2 * i] = two.x;
        out[2 * i + 1] = two.y;
      }
    } else {
      T values[V];
      memcpy(values, &words, sizeof(words));
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = convert<A>(values[i]);
    }
  }

  template <typename A>
  __device__ __forceinline__ void set(const A (&in)[V]) {
    if constexpr (sizeof(T) == 2 && V > 1) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) words.values[i] = pack(in[2 * i], in[2 * i + 1]);
    } else {
      T values[V];
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = convert<T>(in[i]);
      memcpy(&words, values, sizeof(words));
    }
  }

 private:
  __device__ __forceinline__ static float2 unpack(uint32_t word) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    } else {
      __half2 two;
      memcpy(&two, &word, sizeof(word));
      return __half22float2(two);
    }
  }

  __device__ __forceinline__ static uint32_t pack(float a, float b) {
    uint32_t word;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
      memcpy(&word, &two, sizeof(word));
    } else {
      const __half2 two = __floats2half2_rn(a, b);
      memcpy(&word, &two, sizeof(word));
    }
    return word;
  }
};

// N neighbours, aligned to all of them or to 16 bytes.
template <int N, typename Source, typename A>
__device__ __forceinline__ void load_vector(const Source* source, A* out) {
  constexpr int kChunk = N * sizeof(Source) <= 16 ? N : static_cast<int>(16 / sizeof(Source));
#pragma unroll
  for (int i = 0; i < N; i += kChunk) {
    const auto packed = *reinterpret_cast<const Packed<Source, kChunk>*>(source + i);
    A chunk[kChunk];
    packed.get(chunk);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) out[i + j] = chunk[j];
  }
}

// Heads in memory: [batch, token, head], strides in bytes.
struct HeadMemory {
  unsigned char* data = nullptr;
  int64_t batch = 0;
  int64_t token = 0;
  int64_t head = 0;
};

struct TensorPlan {
  HeadMemory in;
  HeadMemory out;
  int heads = 0;
  int warps = 0;  // that serve it
};

// How the work is laid out, decided on the host.
struct RopeGeometry {
  int log_group = 0;     // lanes of a head
  int rotary_items = 0;  // an item is two vectors: the two halves of V pairs,
  int copy_items = 0;    // or what lies behind the rotated part
  int copy_vectors = 0;
  int rows = 1;  // of a warp; a row is the heads that it holds at a time
  TensorPlan tensors[2];
  int warps_per_token = 1;  // in a block
  int tokens_per_block = 1;
  uint32_t tokens = 0;        // of all batches
  uint32_t token_blocks = 0;  // along x
  uint32_t warp_blocks = 1;   // along y, where a token has more warps than a block
};

// Warps of a block.
__host__ __device__ inline int warps_of(const RopeGeometry& geometry) {
  return geometry.tokens_per_block * geometry.warps_per_token;
}

// Up to a multiple of 16 bytes.
template <typename A>
__host__ __device__ int padded(int elements) {
  constexpr int kUnit = 16 / sizeof(A);
  return (elements + kUnit - 1) / kUnit * kUnit;
}

// Elements of shared memory for the angles of a block's warps, at its beginning.
template <typename A, Path kPath>
__host__ __device__ int angle_elements(const RopeArgs& args, const RopeGeometry& geometry) {
  return kPath != Path::kStaged ? 0
                                : padded<A>(warps_of(geometry) * static_cast<int>(args.rotary_dim));
}

// Where the two vectors of an item lie in the head.
template <int V>
struct Item {
  int index;
  int first;
  int second;
  bool first_exists;
  bool second_exists;
  bool turns;

  __device__ __forceinline__ static Item of(int index, const RopeArgs& args,
                                            const RopeGeometry& geometry) {
    const int rotary_dim = static_cast<int>(args.rotary_dim);
    const int copy = index - geometry.rotary_items;
    Item item;
    item.index = index;
    item.turns = copy < 0;
    // One element holds no pair, so its pair is the other vector.
    const bool neighbours = V == 1 && args.interleaved;
    const int turned = neighbours ? 2 * index : index * V;
    item.first = item.turns ? turned : rotary_dim + copy * V;
    item.second =
        item.first + (!item.turns ? geometry.copy_items * V : (neighbours ? 1 : rotary_dim / 2));
    item.first_exists = copy < geometry.copy_items;
    item.second_exists =
        item.turns || (item.first_exists && copy + geometry.copy_items < geometry.copy_vectors);
    return item;
  }
};

// A lane holds so many items that 32 lanes hold a head of 512.
template <int V>
inline constexpr int kItemsPerLane = 8 / V;

template <Path kPath, int V, int kItems>
__device__ __forceinline__ void find_items(int lane_of_group, const RopeArgs& args,
                                           const RopeGeometry& geometry, Item<V> (&items)[kItems]) {
  if constexpr (kPath == Path::kPlain) {
    static_assert(kItems == 1);
    const int first = lane_of_group * V;
    items[0] = {lane_of_group, first, first + static_cast<int>(args.head_dim) / 2,
                true,          true,  true};
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      items[i] = Item<V>::of(lane_of_group + (i << geometry.log_group), args, geometry);
    }
  }
}

// One lane's part in the work.
struct Lane {
  int lane;
  int warp;  // in the block
  int group;
  int lane_of_group;
  int tensor;      // 0 for q, 1 for k
  int first_head;  // the group's, in the first row
  int heads_per_row;
  int rows;  // of the warp that have a head
  int token_in_block;
  uint32_t token;  // in the flat row
  uint32_t batch;
  uint32_t token_in_batch;

  template <Path kPath>
  __device__ __forceinline__ static Lane of(const RopeArgs& args, const RopeGeometry& geometry,
                                            uint32_t block) {
    Lane mine;
    mine.lane = threadIdx.x;
    mine.group = mine.lane >> geometry.log_group;
    mine.lane_of_group = mine.lane & ((1 << geometry.log_group) - 1);
    mine.heads_per_row = kWarpSize >> geometry.log_group;
    // Shuffled, so that the compiler knows that the whole warp agrees.
    mine.token_in_block = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.z), 0);
    const int warp_in_block = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.y), 0);
    int warp = static_cast<int>(blockIdx.y) * geometry.warps_per_token + warp_in_block;
    mine.warp = mine.token_in_block * geometry.warps_per_token + warp_in_block;
    mine.tensor = warp < geometry.tensors[0].warps ? 0 : 1;
    if (mine.tensor == 1) warp -= geometry.tensors[0].warps;
    const int first_of_warp = warp * geometry.rows * mine.heads_per_row;
    const int heads = geometry.tensors[mine.tensor].heads - first_of_warp;
    mine.rows = min(geometry.rows, (heads + mine.heads_per_row - 1) >> (5 - geometry.log_group));
    mine.first_head = first_of_warp + mine.group;
    mine.move_to<kPath>(args, geometry, block);
    return mine;
  }

  template <Path kPath>
  __device__ __forceinline__ void move_to(const RopeArgs& args, const RopeGeometry& geometry,
                                          uint32_t block) {
    token = block * geometry.tokens_per_block + token_in_block;
    const bool one_batch = kPath == Path::kPlain || args.batch == 1;
    batch = one_batch ? 0 : token / static_cast<uint32_t>(args.tokens);
    token_in_batch = token - batch * static_cast<uint32_t>(args.tokens);
  }

  __device__ __forceinline__ int head(int row) const { return first_head + row * heads_per_row; }
};

// a * b in one instruction, of factors that are known to be 32 bits long.
__device__ __forceinline__ uint64_t wide_product(uint32_t a, uint32_t b) {
  return static_cast<uint64_t>(a) * b;
}

// Where one lane's vectors lie, row after row.
struct Rows {
  unsigned char* first;
  int64_t step;

  template <Path kPath>
  __device__ __forceinline__ static Rows of(const HeadMemory& memory, const Lane& lane) {
    if constexpr (kPath == Path::kPlain) {
      const auto head = static_cast<uint32_t>(memory.head);
      return {memory.data + wide_product(lane.token, static_cast<uint32_t>(memory.token)) +
                  wide_product(lane.first_head, head),
              static_cast<uint32_t>(lane.heads_per_row) * head};
    }
    unsigned char* first = memory.data + lane.token_in_batch * memory.token +
                           static_cast<uint32_t>(lane.first_head) * memory.head;
    if (lane.batch > 0) first += lane.batch * memory.batch;
    return {first, static_cast<uint32_t>(lane.heads_per_row) * memory.head};
  }

  template <typename T>
  __device__ __forceinline__ T* head(int row) const {
    return reinterpret_cast<T*>(first + row * step);
  }
};

// The segment of a token, all lanes asking for the same one: 32 offsets at a time.
__device__ __forceinline__ int segment_of_warp(const SeqLens& seqlens, int token, int lane) {
  int low = 0;
  int high = static_cast<int>(seqlens.n_seqs);
  while (true) {
    const int step = (high - low) / kWarpSize + 1;
    const int mine = low + lane * step;
    const bool before = mine <= high && seqlens.cu_seqlens[mine] <= token;
    const int count = __popc(__ballot_sync(kFullWarp, before));
    // Offsets that do not ascend may leave nothing before the token; any segment is safe then.
    low += (count > 0 ? count - 1 : 0) * step;
    if (step == 1) return low;
    high = min(low + step - 1, high);
  }
}

// The id of a token as it comes from memory. Angles are waited for twice, for a token's position
// and for the table's row, so a kernel asks for the first before anything else, and looks at it
// once it has asked for everything else.
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

// Where the table's row of a token starts, in one plane.
struct TableRow {
  int64_t cos;
  int64_t sin;
  bool exists;  // the table holds the position

  template <Path kPath>
  __device__ __forceinline__ static TableRow of(const RopeArgs& args, const Lane& lane,
                                                const AskedPosition& asked, int plane) {
    if constexpr (kPath == Path::kPlain) return of_plain(args, lane, asked);
    const RopePositions& positions = args.positions;
    const RopeTable& table = args.table;
    int64_t position = lane.token_in_batch;
    bool exists = true;
    if (positions.source != PositionSource::kToken) {
      if (positions.source == PositionSource::kSegments) {
        const int token_of_all = static_cast<int>(lane.token * positions.cp_size);
        const int segment = segment_of_warp(positions.seqlens, token_of_all, lane.lane);
        position = positions.in_segment(lane.token, segment);
      } else if (positions.source == PositionSource::kIds) {
        position = positions.given(plane, lane.batch, position);
      } else {
        position = positions.dense(position);
      }
      exists = position >= 0 && position < table.rows;
    }
    // The planes of a position's table are one, and so are its batches: strides of 0.
    const auto row = static_cast<uint32_t>(exists ? position : 0);
    TableRow found{row * table.cos_strides[2], row * table.sin_strides[2], exists};
    if (positions.source == PositionSource::kToken) {
      found.cos += plane * table.cos_strides[0] + lane.batch * table.cos_strides[1];
      found.sin += plane * table.sin_strides[0] + lane.batch * table.sin_strides[1];
    }
    return found;
  }

  // The same where is_plain() holds.
  __device__ __forceinline__ static TableRow of_plain(const RopeArgs& args, const Lane& lane,
                                                      const AskedPosition& asked) {
    const RopePositions& positions = args.positions;
    const RopeTable& table = args.table;
    int64_t position = lane.token;
    if (positions.source == PositionSource::kIds) {
      position = asked.get(positions);
    } else if (positions.source == PositionSource::kSegments) {
      const SeqLens& seqlens = positions.seqlens;
      const int token = static_cast<int>(lane.token);
      position = token - seqlens.begin(segment_of_warp(seqlens, token, lane.lane));
    } else if (positions.source == PositionSource::kDense) {
      position += positions.first;
    }
    const bool exists = positions.source == PositionSource::kToken ||
                        static_cast<uint64_t>(position) < static_cast<uint64_t>(table.rows);
    const auto row = static_cast<uint32_t>(exists ? position : 0);
    const auto offset = [&](int64_t stride) {
      return static_cast<int64_t>(wide_product(row, static_cast<uint32_t>(stride)));
    };
    return {offset(table.cos_strides[2]), offset(table.sin_strides[2]), exists};
  }

  __device__ __forceinline__ TableRow of_lane(int lane) const {
    return {__shfl_sync(kFullWarp, cos, lane), __shfl_sync(kFullWarp, sin, lane),
            static_cast<bool>(__shfl_sync(kFullWarp, static_cast<int>(exists), lane))};
  }
};

template <typename Table, typename A>
__device__ __forceinline__ void stage_pair(const RopeArgs& args, const TableRow& row, int pair,
                                           bool back, A* shared_cos, A* shared_sin) {
  const int64_t column = pair * static_cast<int>(args.table.column_step);
  A cos = static_cast<A>(NAN);
  A sin = static_cast<A>(NAN);
  if (row.exists) {
    cos = convert<A>(static_cast<const Table*>(args.table.cos)[row.cos + column]);
    sin = convert<A>(static_cast<const Table*>(args.table.sin)[row.sin + column]);
  }
  shared_cos[pair] = cos;
  shared_sin[pair] = back ? -sin : sin;
}

// Puts the cosines and sines of a warp's token into shared memory, [rotary_dim / 2] each; with
// `back`, those that turn the other way. A position that the table does not hold gives NaN: it must
// be seen, not read from elsewhere. `row` is that of the plane numbered as the lane.
template <typename A>
__device__ __forceinline__ void stage_angles(const RopeArgs& args, const Lane& lane,
                                             const TableRow& row, bool back, A* shared_cos,
                                             A* shared_sin) {
  const int pairs = static_cast<int>(args.rotary_dim) / 2;
  const bool one_plane = args.planes.kind == Planes::kOne;
  __syncwarp();  // all lanes have read the angles of the token before
  dispatch_float(args.table.dtype, [&]<typename Table>() {
#pragma unroll 1
    for (int first = 0; first < pairs; first += kWarpSize) {
      const int pair = first + lane.lane;
      const TableRow own = one_plane ? row : row.of_lane(args.planes.plane_of(pair));
      if (pair < pairs) stage_pair<Table>(args, own, pair, back, shared_cos, shared_sin);
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

  // Of the pairs from `cosines` and `sines` on.
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

  __device__ __forceinline__ void load_row(const TableRow& row, const Item<V>& item, bool back,
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
    if (back) {
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
    // Fused by hand: the compiler would choose anew in each kernel, and results differ in a bit.
    a = fma(x, c, -(y * s));
    b = fma(y, c, x * s);
  }
};

// `shared` has room for the angles of the block's warps where they go through it. The whole warp
// calls.
template <Path kPath, typename T, int V, bool kInterleaved, int kItems>
__device__ __forceinline__ void load_angles(const RopeArgs& args, const Lane& lane,
                                            const AskedPosition& asked,
                                            const Item<V> (&items)[kItems], bool back,
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
      if (items[i].turns) angles[i].load_row(row, items[i], back, args);
    }
  } else {
    const int rotary_dim = static_cast<int>(args.rotary_dim);
    Arithmetic<T>* cosines = shared + lane.warp * rotary_dim;
    Arithmetic<T>* sines = cosines + rotary_dim / 2;
    // Lane 0 looks for time, lane 1 for height, the others for width.
    const TableRow row = TableRow::of<kPath>(args, lane, asked, one_plane ? 0 : min(lane.lane, 2));
    stage_angles(args, lane, row, back, cosines, sines);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].turns) angles[i].load(cosines, sines, items[i], args);
    }
  }
}

// An item's two vectors.
template <typename T, int V>
struct Pair {
  using Vector = Packed<T, V>;
  Vector first;
  Vector second;

  // Leaves what was there where a vector does not exist.
  __device__ __forceinline__ void load(const T* head, const Item<V>& item, bool served) {
    if (served && item.first_exists) first = *reinterpret_cast<const Vector*>(head + item.first);
    if (served && item.second_exists) second = *reinterpret_cast<const Vector*>(head + item.second);
  }

  __device__ __forceinline__ void store(T* head, const Item<V>& item, bool served) const {
    if (served && item.first_exists) *reinterpret_cast<Vector*>(head + item.first) = first;
    if (served && item.second_exists) *reinterpret_cast<Vector*>(head + item.second) = second;
  }

  template <typename A>
  __device__ __forceinline__ void get(A (&a)[V], A (&b)[V]) const {
    first.get(a);
    second.get(b);
  }

  template <typename A>
  __device__ __forceinline__ void set(const A (&a)[V], const A (&b)[V]) {
    first.set(a);
    second.set(b);
  }
};

inline bool has_no_work(const RopeArgs& args) {
  return args.batch * args.tokens == 0 || args.tensors[0].heads + args.tensors[1].heads == 0;
}

inline int size_of(FloatType type) {
  switch (type) {
    case FloatType::kFloat64:
      return 8;
    case FloatType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

inline bool multiple_of(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline bool multiples_of(const int64_t (&strides)[3], int64_t elements) {
  return strides[0] % elements == 0 && strides[1] % elements == 0 && strides[2] % elements == 0;
}

inline bool vectors_fit(const RopeArgs& args, int64_t elements) {
  const int64_t bytes = elements * size_of(args.dtype);
  bool fit =
      (args.rotary_dim / 2) % elements == 0 && (args.head_dim - args.rotary_dim) % elements == 0;
  for (int i = 0; i < args.n_tensors; ++i) {
    const RopeTensor& tensor = args.tensors[i];
    fit = fit && multiple_of(tensor.in, bytes) && multiple_of(tensor.out, bytes) &&
          multiples_of(tensor.in_strides, elements) && multiples_of(tensor.out_strides, elements);
  }
  return fit;
}

// Whether lanes can read their angles from the table: in vectors, each in one plane.
inline bool angles_fit(const RopeArgs& args, int elements) {
  const RopeTable& table = args.table;
  const int64_t size = size_of(table.dtype);
  const int64_t pairs = args.interleaved ? elements / 2 : elements;  // of a vector
  const int64_t bytes = std::min<int64_t>(16, pairs * size);
  const bool is_read = table.dtype == args.dtype ||
                       (table.dtype == FloatType::kFloat32 && args.dtype != FloatType::kFloat64);
  const bool one_plane =
      args.planes.kind == Planes::kOne ||
      (args.planes.kind == Planes::kBlocked && !args.interleaved &&
       args.planes.ends[0] % elements == 0 && args.planes.ends[1] % elements == 0);
  return is_read && one_plane && table.column_step == 1 && multiple_of(table.cos, bytes) &&
         multiple_of(table.sin, bytes) && multiples_of(table.cos_strides, bytes / size) &&
         multiples_of(table.sin_strides, bytes / size);
}

constexpr int kRopeWarps = 4;  // of a block, where one token has no more
constexpr int kMaxWarps = 8;   // of a block
constexpr int kMaxThreads = kMaxWarps * kWarpSize;

inline HeadMemory head_memory(const void* data, const int64_t (&strides)[3], int64_t size) {
  return {static_cast<unsigned char*>(const_cast<void*>(data)), strides[0] * size,
          strides[1] * size, strides[2] * size};
}

// Vectors of what lies behind the rotated part of a head.
inline int copy_vectors_of(const RopeArgs& args, int elements) {
  return static_cast<int>((args.head_dim - args.rotary_dim) / elements);
}

// Items of a head, with what lies behind the rotated part or without.
inline int items_of_head(const RopeArgs& args, int elements, bool copies) {
  return static_cast<int>(args.rotary_dim / 2 / elements) +
         (copies ? (copy_vectors_of(args, elements) + 1) / 2 : 0);
}

// Lanes of a head: the least power of two.
inline int log_group_of(int items) {
  int log_group = 0;
  while (log_group < 5 && (1 << log_group) < items) ++log_group;
  return log_group;
}

// Warps of a multiprocessor whose lanes have so many registers: each of its quarters has 512 a
// lane.
constexpr int warps_of_registers(int registers) { return 4 * (512 / registers); }

// Warps that all heads need, of so many items each, with so many rows a warp.
inline int64_t warps_needed(const RopeArgs& args, int items, int rows) {
  const int heads_per_warp = rows * (kWarpSize >> log_group_of(items));
  int64_t warps = 0;
  for (int i = 0; i < args.n_tensors; ++i) warps += ceil_div(args.tensors[i].heads, heads_per_warp);
  return warps * args.batch * args.tokens;
}

// The fewest rows of a warp with which a GPU has registers for all warps at a time, so that hardly
// one waits for a whole other one; 0 where `most` are too few. A multiprocessor has registers for
// `warps_at_a_time`, less what whole blocks leave unused.
inline int rows_of_one_wave(const RopeArgs& args, int items, int warps_at_a_time, int most) {
  const int64_t room = static_cast<int64_t>(multiprocessors()) * warps_at_a_time;
  for (int rows = 1; rows <= most; ++rows) {
    if (warps_needed(args, items, rows) <= room) return rows;
  }
  return 0;
}

// `copies` says whether what lies behind the rotated part is moved; `rows` how many a warp serves.
inline RopeGeometry rope_geometry(const RopeArgs& args, int elements, int rows, bool copies,
                                  int max_warps = kMaxWarps) {
  RopeGeometry geometry;
  geometry.rotary_items = static_cast<int>(args.rotary_dim / 2 / elements);
  if (copies) {
    geometry.copy_vectors = copy_vectors_of(args, elements);
    geometry.copy_items = (geometry.copy_vectors + 1) / 2;
  }
  geometry.log_group = log_group_of(items_of_head(args, elements, copies));
  const int heads_per_warp = rows * (kWarpSize >> geometry.log_group);
  const int64_t size = size_of(args.dtype);
  geometry.rows = rows;
  int64_t warps = 0;
  for (int i = 0; i < args.n_tensors; ++i) {
    TensorPlan& plan = geometry.tensors[i];
    const RopeTensor& tensor = args.tensors[i];
    plan.in = head_memory(tensor.in, tensor.in_strides, size);
    plan.out = head_memory(tensor.out, tensor.out_strides, size);
    plan.heads = static_cast<int>(tensor.heads);
    plan.warps = static_cast<int>(ceil_div(tensor.heads, heads_per_warp));
    warps += plan.warps;
  }
  warps = std::max<int64_t>(warps, 1);  // where no tensor has a head
  geometry.warp_blocks = static_cast<uint32_t>(ceil_div(warps, max_warps));
  geometry.warps_per_token = static_cast<int>(ceil_div(warps, geometry.warp_blocks));
  geometry.tokens_per_block =
      std::max(std::min(kRopeWarps, max_warps) / geometry.warps_per_token, 1);
  geometry.tokens = static_cast<uint32_t>(args.batch * args.tokens);
  geometry.token_blocks =
      static_cast<uint32_t>(ceil_div(geometry.tokens, geometry.tokens_per_block));
  return geometry;
}

// Lanes, warps of a token, tokens.
inline dim3 threads_of(const RopeGeometry& geometry) {
  return dim3(kWarpSize, geometry.warps_per_token, geometry.tokens_per_block);
}

inline dim3 blocks_of(const RopeGeometry& geometry) {
  return dim3(geometry.token_blocks, geometry.warp_blocks);
}

// Whether tokens of all batch rows are as far apart as those of one, and neither they nor the heads
// of a warp further apart than 32 bits can say in bytes.
inline bool is_flat(const int64_t (&strides)[3], int64_t size, const RopeArgs& args) {
  const int64_t limit = (int64_t{1} << 32) / size;
  return (args.batch == 1 || strides[0] == args.tokens * strides[1]) && strides[1] < limit &&
         strides[2] < limit / kWarpSize;
}

// Whole heads turn, by one plane, with lanes for each of their vectors and for no more; tokens are
// flat, and so is what has their positions, none of them of context parallelism.
inline bool is_plain(const RopeArgs& args, int elements) {
  const int64_t vectors = args.head_dim / elements;
  const RopePositions& positions = args.positions;
  bool plain = args.rotary_dim == args.head_dim && (vectors & (vectors - 1)) == 0 &&
               args.planes.kind == Planes::kOne && positions.cp_size == 1;
  for (int i = 0; i < args.n_tensors; ++i) {
    const RopeTensor& tensor = args.tensors[i];
    plain = plain && is_flat(tensor.in_strides, size_of(args.dtype), args) &&
            is_flat(tensor.out_strides, size_of(args.dtype), args);
  }
  // A row of the table, and the ids of a token, as [batch, token] that no head has a part in.
  const auto flat_rows = [&](const int64_t(&strides)[3]) {
    const int64_t rows[3] = {strides[1], strides[2], 0};
    return is_flat(rows, sizeof(int64_t), args);
  };
  const auto short_rows = [](int64_t stride) { return stride < int64_t{1} << 31; };
  switch (positions.source) {
    case PositionSource::kIds:
      plain = plain && flat_rows(positions.id_strides);
      break;
    case PositionSource::kToken:
      plain = plain && flat_rows(args.table.cos_strides) && flat_rows(args.table.sin_strides);
      break;
    case PositionSource::kDense:
      plain = plain && args.batch == 1;
      break;
    case PositionSource::kSegments:
      break;
  }
  return plain && short_rows(args.table.cos_strides[2]) && short_rows(args.table.sin_strides[2]);
}

// Calls run.template operator()<T, V, kInterleaved, kPath>() for the dtype, the widest vectors that
// fit, 16 bytes, two elements or one, and the path; `fits` and `plain` say for how wide vectors the
// kernel's other arguments allow kDirect and kPlain. One element holds no pair, so there it is read
// at run time.
template <typename T, int V, Path kPath, typename Run>
void with_pairing(const RopeArgs& args, const Run& run) {
  if (args.interleaved) return run.template operator()<T, V, true, kPath>();
  run.template operator()<T, V, false, kPath>();
}

template <typename T, typename Fits, typename Plain, typename Run>
void with_vectors(const RopeArgs& args, const Fits& fits, const Plain& plain, const Run& run) {
  constexpr int kWide = 16 / sizeof(T);
  if (vectors_fit(args, kWide)) {
    if constexpr (sizeof(T) <= 4) {
      if (angles_fit(args, kWide) && fits(kWide)) {
        if constexpr (sizeof(T) == 2) {
          if (!args.interleaved && is_plain(args, kWide) && plain(kWide)) {
            return run.template operator()<T, kWide, false, Path::kPlain>();
          }
        }
        return with_pairing<T, kWide, Path::kDirect>(args, run);
      }
    }
    return with_pairing<T, kWide, Path::kStaged>(args, run);
  }
  if constexpr (kWide > 4) {
    if (vectors_fit(args, 2)) return with_pairing<T, 2, Path::kStaged>(args, run);
  }
  run.template operator()<T, 1, false, Path::kStaged>();
}

template <typename Fits, typename Plain, typename Run>
void dispatch_rope(const RopeArgs& args, const Fits& fits, const Plain& plain, const Run& run) {
  switch (args.dtype) {
    case FloatType::kFloat32:
      return with_vectors<float>(args, fits, plain, run);
    case FloatType::kFloat64:
      return with_vectors<double>(args, fits, plain, run);
    case FloatType::kBFloat16:
      return with_vectors<__nv_bfloat16>(args, fits, plain, run);
    case FloatType::kFloat16:
      return with_vectors<__half>(args, fits, plain, run);
  }
}

template <typename Run>
void dispatch_rope(const RopeArgs& args, const Run& run) {
  const auto always = [](int) { return true; };
  dispatch_rope(args, always, always, run);
}

}  // namespace cuseq::cuda
