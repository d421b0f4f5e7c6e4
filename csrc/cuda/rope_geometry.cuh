#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/launch.cuh"
#include "ops/rope.h"

// How the work of a rotation is laid out, decided on the host.
namespace cuseq::cuda {

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

}  // namespace cuseq::cuda
