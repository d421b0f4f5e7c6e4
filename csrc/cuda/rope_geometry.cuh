#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/launch.cuh"
#include "ops/rope.h"

// The division of a rotation's work among threads, decided on the host.
namespace cuseq::cuda {

// Heads in memory, [batch, token, head], with strides in bytes.
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
  int warps = 0;  // per token
};

struct RopeGeometry {
  // An item is two vectors: the two halves of V pairs, or two vectors after the rotated part.
  int log_group = 0;     // log2 of the lanes per head
  int rotary_items = 0;  // per head
  int copy_items = 0;    // per head
  int copy_vectors = 0;  // per head
  int rows = 1;          // per warp; a row is the heads that a warp holds at a time
  TensorPlan tensors[2];
  int warps_per_token = 1;  // within a block
  int tokens_per_block = 1;
  uint32_t tokens = 0;        // of all batches
  uint32_t token_blocks = 0;  // along x
  uint32_t warp_blocks = 1;   // along y, above 1 if a token needs more warps than a block has
};

// Return the warps per block.
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

constexpr int kRopeWarps = 4;  // per block, unless one token needs more
constexpr int kMaxWarps = 8;   // per block
constexpr int kMaxThreads = kMaxWarps * kWarpSize;

inline HeadMemory head_memory(const void* data, const int64_t (&strides)[3], int64_t size) {
  return {static_cast<unsigned char*>(const_cast<void*>(data)), strides[0] * size,
          strides[1] * size, strides[2] * size};
}

// Return the vectors per head after its rotated part.
inline int copy_vectors_of(const RopeArgs& args, int elements) {
  return static_cast<int>((args.head_dim - args.rotary_dim) / elements);
}

// Return the items per head; `copies` says whether to include the part after the rotated one.
inline int items_of_head(const RopeArgs& args, int elements, bool copies) {
  return static_cast<int>(args.rotary_dim / 2 / elements) +
         (copies ? (copy_vectors_of(args, elements) + 1) / 2 : 0);
}

// Return log2 of the lanes per head: the least power of two that covers the items, at most 32.
inline int log_group_of(int items) {
  int log_group = 0;
  while (log_group < 5 && (1 << log_group) < items) ++log_group;
  return log_group;
}

// Return the warps that fit on a multiprocessor with `registers` per thread: each of its four
// quarters has 512 registers per lane.
constexpr int warps_of_registers(int registers) { return 4 * (512 / registers); }

// Return the warps that all heads need, with `items` per head and `rows` per warp.
inline int64_t warps_needed(const RopeArgs& args, int items, int rows) {
  const int heads_per_warp = rows * (kWarpSize >> log_group_of(items));
  int64_t warps = 0;
  for (int i = 0; i < args.n_tensors; ++i) warps += ceil_div(args.tensors[i].heads, heads_per_warp);
  return warps * args.batch * args.tokens;
}

// Return the fewest rows per warp, up to `most`, with which all warps run in one wave, or 0 if
// there is no such number. In one wave hardly any warp waits for another to finish. A
// multiprocessor has registers for `warps_at_a_time`, minus those that whole blocks leave unused.
inline int rows_of_one_wave(const RopeArgs& args, int items, int warps_at_a_time, int most) {
  const int64_t room = static_cast<int64_t>(multiprocessors()) * warps_at_a_time;
  for (int rows = 1; rows <= most; ++rows) {
    if (warps_needed(args, items, rows) <= room) return rows;
  }
  return 0;
}

// Return the geometry with `rows` per warp; `copies` says whether the part of a head after the
// rotated one is copied.
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
  warps = std::max<int64_t>(warps, 1);  // if no tensor has a head
  geometry.warp_blocks = static_cast<uint32_t>(ceil_div(warps, max_warps));
  geometry.warps_per_token = static_cast<int>(ceil_div(warps, geometry.warp_blocks));
  geometry.tokens_per_block =
      std::max(std::min(kRopeWarps, max_warps) / geometry.warps_per_token, 1);
  geometry.tokens = static_cast<uint32_t>(args.batch * args.tokens);
  geometry.token_blocks =
      static_cast<uint32_t>(ceil_div(geometry.tokens, geometry.tokens_per_block));
  return geometry;
}

// Return the block shape: lanes, warps per token, tokens.
inline dim3 threads_of(const RopeGeometry& geometry) {
  return dim3(kWarpSize, geometry.warps_per_token, geometry.tokens_per_block);
}

inline dim3 blocks_of(const RopeGeometry& geometry) {
  return dim3(geometry.token_blocks, geometry.warp_blocks);
}

// Return whether the token stride is the same across batch rows as within one, and the offsets of
// consecutive tokens and of the heads of a warp, in bytes, fit in 32 bits.
inline bool is_flat(const int64_t (&strides)[3], int64_t size, const RopeArgs& args) {
  const int64_t limit = (int64_t{1} << 32) / size;
  return (args.batch == 1 || strides[0] == args.tokens * strides[1]) && strides[1] < limit &&
         strides[2] < limit / kWarpSize;
}

}  // namespace cuseq::cuda
