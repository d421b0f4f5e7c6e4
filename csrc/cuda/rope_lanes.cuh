#pragma once

#include <cstdint>

#include "cuda/rope_geometry.cuh"
#include "cuda/vectors.cuh"

// Shared by the rotations with and without norm. A warp handles heads of q or of k of one token. A
// group of its lanes handles one head at a time, so angles are read once for many heads:
//
//   warp:   |  head 0  |  head 1  |  head 2  |  head 3  |   then heads 4 to 7, ...
//   lane:    0 1 .. 7   8 .. 15    16 .. 23   24 .. 31      (head_dim 128 in bf16)
//   lane l of a group holds 16 bytes of each half of the rotated part, which pair up.
//
// Without care these kernels are bound by instructions per warp, not by memory. So the host
// computes all it can in RopeGeometry, and each lane reads its own angles from the table, 16 bytes
// at a time. If the table does not allow that, each warp stages its token's angles in shared
// memory.
namespace cuseq::cuda {

// What a kernel assumes of its arguments. Separate instantiations: dead branches still cost
// registers and instruction fetches. On an H200 calls for which is_plain() holds take, in bf16 from
// 2,048 to 131,072 tokens, up to 21 % longer by kStaged than by kPlain, with norms up to 30 %; by
// kDirect up to 10 %, with norms up to 19 % forward and 2 to 11 % with the backward.
enum class Path {
  kStaged,  // no assumptions; angles go through shared memory
  kDirect,  // each lane reads its angles, and any weights, from global memory in vectors
  kPlain,   // as kDirect, and is_plain() holds
};

// Return `elements` rounded up to a multiple of 16 bytes.
template <typename A>
__host__ __device__ int padded(int elements) {
  constexpr int kUnit = 16 / sizeof(A);
  return (elements + kUnit - 1) / kUnit * kUnit;
}

// Return the elements, at the start of shared memory, for the angles of all warps of a block.
template <typename A, Path kPath>
__host__ __device__ int angle_elements(const RopeArgs& args, const RopeGeometry& geometry) {
  return kPath != Path::kStaged ? 0
                                : padded<A>(warps_of(geometry) * static_cast<int>(args.rotary_dim));
}

// The offsets of an item's two vectors in the head.
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
    // A vector of one element holds no pair, so its partner is the item's other vector.
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

// Enough items per lane for 32 lanes to hold a head of 512 elements.
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

// The share of the work of one lane.
struct Lane {
  int lane;
  int warp;  // within the block
  int group;
  int lane_of_group;
  int tensor;      // 0 for q, 1 for k
  int first_head;  // the group's head in the first row
  int heads_per_row;
  int rows;  // rows of the warp that have a head
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
    // The shuffle tells the compiler that the value is the same in all lanes of the warp.
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

// Return a * b in 64 bits, as one instruction because the factors have 32 bits.
__device__ __forceinline__ uint64_t wide_product(uint32_t a, uint32_t b) {
  return static_cast<uint64_t>(a) * b;
}

// The address of a lane's heads, row after row.
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

// The two vectors of an item.
template <typename T, int V>
struct Pair {
  using Vector = Packed<T, V>;
  Vector first;
  Vector second;

  // Load the item; a vector that does not exist keeps its value.
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

}  // namespace cuseq::cuda
