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
// Where an angle comes from has many cases, and so lies outside the loop over heads: each warp
// first puts the angles of its token into shared memory.
namespace cuseq::cuda {

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

// N neighbours from shared memory, aligned to N of them, in accesses of at most 16 bytes.
template <int N, typename A>
__device__ __forceinline__ void load_shared(const A* source, A (&out)[N]) {
  constexpr int kChunk = N * sizeof(A) <= 16 ? N : static_cast<int>(16 / sizeof(A));
#pragma unroll
  for (int i = 0; i < N; i += kChunk) {
    const auto chunk = *reinterpret_cast<const Vec<A, kChunk>*>(source + i);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) out[i + j] = chunk.values[j];
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

// The warps of one tensor's heads. A row is the heads that a warp holds at a time.
struct TensorWarps {
  int count = 0;
  int rows = 0;      // of each
  int all_rows = 0;  // of all of them
};

// How the work is laid out, decided on the host.
struct RopeGeometry {
  int log_group = 0;     // lanes of a head
  int rotary_items = 0;  // an item is two vectors: the two halves of V pairs,
  int copy_items = 0;    // or what lies behind the rotated part
  int copy_vectors = 0;
  TensorWarps tensors[2];
  int warps_per_token = 1;  // in a block
  int tokens_per_block = 1;
  uint32_t token_blocks = 0;  // along x
  uint32_t warp_blocks = 1;   // along y, where a token has more warps than a block
};

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

// One lane's part in the work.
struct Lane {
  int lane;
  int warp;  // in the block
  int group;
  int lane_of_group;
  int tensor;      // 0 for q, 1 for k
  int rows;        // of the warp; none for those that fill up the last block
  int first_head;  // the group's, in the first row
  int heads_per_row;
  int token_in_block;
  uint32_t token;  // in the flat row
  uint32_t batch;
  uint32_t token_in_batch;

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
    const int warp = static_cast<int>(blockIdx.y) * geometry.warps_per_token + warp_in_block;
    mine.warp = mine.token_in_block * geometry.warps_per_token + warp_in_block;
    mine.tensor = warp < geometry.tensors[0].count ? 0 : 1;
    const TensorWarps& warps = geometry.tensors[mine.tensor];
    const int first_row = (mine.tensor == 0 ? warp : warp - geometry.tensors[0].count) * warps.rows;
    mine.rows = max(0, min(warps.rows, warps.all_rows - first_row));
    mine.first_head = first_row * mine.heads_per_row + mine.group;
    mine.move_to(args, geometry, block);
    return mine;
  }

  __device__ __forceinline__ void move_to(const RopeArgs& args, const RopeGeometry& geometry,
                                          uint32_t block) {
    token = block * geometry.tokens_per_block + token_in_block;
    batch = args.batch == 1 ? 0 : token / static_cast<uint32_t>(args.tokens);
    token_in_batch = token - batch * static_cast<uint32_t>(args.tokens);
  }

  __device__ __forceinline__ int head(int row) const { return first_head + row * heads_per_row; }

  __device__ __forceinline__ bool serves(const RopeArgs& args, int row) const {
    return row < rows && head(row) < static_cast<int>(args.tensors[tensor].heads);
  }
};

__device__ __forceinline__ int64_t offset_of(const int64_t (&strides)[3], int64_t a, int64_t b,
                                             int64_t c) {
  return a * strides[0] + b * strides[1] + c * strides[2];
}

// The heads that one group serves, row after row, from `first` on.
template <typename T>
struct Heads {
  T* first;
  int64_t step;

  __device__ __forceinline__ static Heads of(T* base, const int64_t (&strides)[3],
                                             const Lane& lane) {
    return {base + offset_of(strides, lane.batch, lane.token_in_batch, lane.first_head),
            lane.heads_per_row * strides[2]};
  }

  __device__ __forceinline__ T* operator[](int row) const { return first + row * step; }
};

template <typename T>
__device__ __forceinline__ Heads<const T> inputs_of(const RopeArgs& args, const Lane& lane) {
  const RopeTensor& tensor = args.tensors[lane.tensor];
  return Heads<const T>::of(static_cast<const T*>(tensor.in), tensor.in_strides, lane);
}

template <typename T>
__device__ __forceinline__ Heads<T> outputs_of(const RopeArgs& args, const Lane& lane) {
  const RopeTensor& tensor = args.tensors[lane.tensor];
  return Heads<T>::of(static_cast<T*>(tensor.out), tensor.out_strides, lane);
}

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

// Where the table's row of a token starts, in the plane of this lane: lane 0 looks for time, lane 1
// for height, the others for width; with one plane all of them for the only one.
struct TableRow {
  int64_t cos;
  int64_t sin;
  bool exists;  // the table holds the position

  __device__ __forceinline__ static TableRow of(const RopeArgs& args, const Lane& lane) {
    const RopePositions& positions = args.positions;
    const RopeTable& table = args.table;
    const int plane = args.planes.kind == Planes::kOne ? 0 : min(lane.lane, 2);
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
    return {offset_of(table.cos_strides, plane, lane.batch, exists ? position : 0),
            offset_of(table.sin_strides, plane, lane.batch, exists ? position : 0), exists};
  }

  __device__ __forceinline__ TableRow of_plane(int plane) const {
    return {__shfl_sync(kFullWarp, cos, plane), __shfl_sync(kFullWarp, sin, plane),
            static_cast<bool>(__shfl_sync(kFullWarp, static_cast<int>(exists), plane))};
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

template <typename Table, typename A>
__device__ __forceinline__ void stage_row(const RopeArgs& args, const Lane& lane,
                                          const TableRow& row, bool back, A* shared_cos,
                                          A* shared_sin) {
  const int pairs = static_cast<int>(args.rotary_dim) / 2;
  if (args.planes.kind == Planes::kOne) {
#pragma unroll 2
    for (int pair = lane.lane; pair < pairs; pair += kWarpSize) {
      stage_pair<Table>(args, row, pair, back, shared_cos, shared_sin);
    }
    return;
  }
#pragma unroll 1
  for (int first = 0; first < pairs; first += kWarpSize) {
    const int pair = first + lane.lane;
    const TableRow own = row.of_plane(args.planes.plane_of(pair));  // all lanes take part
    if (pair < pairs) stage_pair<Table>(args, own, pair, back, shared_cos, shared_sin);
  }
}

// Puts the cosines and sines of a warp's token into shared memory, [rotary_dim / 2] each; with
// `back`, those that turn the other way. A position that the table does not hold gives NaN: it must
// be seen, not read from elsewhere.
template <typename A>
__device__ __forceinline__ void stage_angles(const RopeArgs& args, const Lane& lane, bool back,
                                             A* shared_cos, A* shared_sin) {
  const TableRow row = TableRow::of(args, lane);
  dispatch_float(args.table.dtype, [&]<typename Table>() {
    stage_row<Table>(args, lane, row, back, shared_cos, shared_sin);
  });
  __syncwarp();
}

// The angles of one item's pairs.
template <int V, bool kInterleaved, typename A>
struct Angles {
  A cos[V] = {};
  A sin[V] = {};

  __device__ __forceinline__ static Angles of(const RopeArgs& args, const Item<V>& item,
                                              const A* shared_cos, const A* shared_sin) {
    Angles angles;
    if (!item.turns) return angles;
    if constexpr (kInterleaved) {
      // Each vector holds V / 2 pairs.
      constexpr int kHalf = V / 2;
      const int first = item.index * kHalf;
      const int second = first + static_cast<int>(args.rotary_dim) / 4;
      A low[kHalf], high[kHalf];
      load_shared(shared_cos + first, low);
      load_shared(shared_cos + second, high);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) angles.cos[i] = low[i], angles.cos[kHalf + i] = high[i];
      load_shared(shared_sin + first, low);
      load_shared(shared_sin + second, high);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) angles.sin[i] = low[i], angles.sin[kHalf + i] = high[i];
    } else {
      load_shared(shared_cos + item.index * V, angles.cos);
      load_shared(shared_sin + item.index * V, angles.sin);
    }
    return angles;
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

// An item's two vectors.
template <typename T, int V>
struct Pair {
  using Vector = Packed<T, V>;
  Vector first;
  Vector second;

  // Leaves zeros where `served` is false or a vector does not exist.
  __device__ __forceinline__ void load(const T* head, const Item<V>& item, bool served) {
    first = second = Vector{};
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

constexpr int kRopeWarps = 4;  // of a block, where one token has no more
constexpr int kMaxWarps = 8;   // of a block
constexpr int kMaxThreads = kMaxWarps * kWarpSize;

// `copies` says whether what lies behind the rotated part is moved; `rows` how many a warp serves.
inline RopeGeometry rope_geometry(const RopeArgs& args, int elements, int rows, bool copies) {
  RopeGeometry geometry;
  geometry.rotary_items = static_cast<int>(args.rotary_dim / 2 / elements);
  if (copies) {
    geometry.copy_vectors = static_cast<int>((args.head_dim - args.rotary_dim) / elements);
    geometry.copy_items = (geometry.copy_vectors + 1) / 2;
  }
  const int items = geometry.rotary_items + geometry.copy_items;
  while (geometry.log_group < 5 && (1 << geometry.log_group) < items) ++geometry.log_group;
  const int heads_per_row = kWarpSize >> geometry.log_group;
  int warps = 0;
  for (int i = 0; i < args.n_tensors; ++i) {
    TensorWarps& tensor = geometry.tensors[i];
    tensor.all_rows = static_cast<int>(ceil_div(args.tensors[i].heads, heads_per_row));
    tensor.count = static_cast<int>(ceil_div(tensor.all_rows, rows));
    // Shared out evenly.
    tensor.rows = static_cast<int>(ceil_div(tensor.all_rows, std::max(tensor.count, 1)));
    warps += tensor.count;
  }
  geometry.warps_per_token = std::clamp(warps, 1, kMaxWarps);
  geometry.warp_blocks =
      static_cast<uint32_t>(ceil_div(std::max(warps, 1), geometry.warps_per_token));
  geometry.tokens_per_block = std::max(kRopeWarps / geometry.warps_per_token, 1);
  geometry.token_blocks =
      static_cast<uint32_t>(ceil_div(args.batch * args.tokens, geometry.tokens_per_block));
  return geometry;
}

inline int warps_of(const RopeGeometry& geometry) {
  return geometry.tokens_per_block * geometry.warps_per_token;
}

// Lanes, warps of a token, tokens.
inline dim3 threads_of(const RopeGeometry& geometry) {
  return dim3(kWarpSize, geometry.warps_per_token, geometry.tokens_per_block);
}

inline dim3 blocks_of(const RopeGeometry& geometry) {
  return dim3(geometry.token_blocks, geometry.warp_blocks);
}

// Bytes of the angles of a block's warps.
template <typename A>
size_t angle_bytes(const RopeArgs& args, const RopeGeometry& geometry) {
  return warps_of(geometry) * args.rotary_dim * sizeof(A);
}

// Calls run.template operator()<T, V, kInterleaved>() for the dtype and the widest vectors that
// fit: 16 bytes, two elements or one. One element holds no pair, so there it is read at run time.
template <typename T, int V, typename Run>
void with_pairing(const RopeArgs& args, const Run& run) {
  if (args.interleaved) return run.template operator()<T, V, true>();
  run.template operator()<T, V, false>();
}

template <typename T, typename Run>
void with_vectors(const RopeArgs& args, const Run& run) {
  constexpr int kWide = 16 / sizeof(T);
  if (vectors_fit(args, kWide)) return with_pairing<T, kWide>(args, run);
  if constexpr (kWide > 4) {
    if (vectors_fit(args, 2)) return with_pairing<T, 2>(args, run);
  }
  run.template operator()<T, 1, false>();
}

template <typename Run>
void dispatch_rope(const RopeArgs& args, const Run& run) {
  switch (args.dtype) {
    case FloatType::kFloat32:
      return with_vectors<float>(args, run);
    case FloatType::kFloat64:
      return with_vectors<double>(args, run);
    case FloatType::kBFloat16:
      return with_vectors<__nv_bfloat16>(args, run);
    case FloatType::kFloat16:
      return with_vectors<__half>(args, run);
  }
}

}  // namespace cuseq::cuda
