#include <bit>
#include <cstdint>

#include "cuda/launch.cuh"
#include "ops/gather_rows.h"

// Rows are copied in vectors of up to 16 bytes, whatever the dtype. One launch serves all tensors,
// and each tensor has its own blocks:
//
//   a row of up to 32 vectors   a group of lanes, one vector each, some rows in flight
//   a longer row                one warp for each segment of the row
namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kShortInFlight = 4;  // rows per thread

// Vectors per thread for long rows. Two of 16 bytes, without a loop, came nearest to the speed of a
// plain copy on an H200; more vectors, whole rows, streaming hints and bulk copies through shared
// memory were slower.
constexpr int in_flight(int width) { return width == 16 ? 2 : 4; }

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<1> {
  using Type = unsigned char;
};
template <>
struct VectorOf<2> {
  using Type = unsigned short;
};
template <>
struct VectorOf<4> {
  using Type = unsigned int;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<16> {
  using Type = uint4;
};

// How a tensor's rows are divided among threads, decided on the host.
struct RowPlan {
  uint32_t vectors = 0;        // per row
  uint32_t chunk_vectors = 0;  // per contiguous chunk
  uint32_t segments = 1;       // per row
  int log_group = 0;           // log2 of the lanes per row, if a warp holds several rows
  int width = 16;              // bytes per vector
};

struct GatherPlan {
  GatherRowsArgs args;
  RowPlan rows[kMaxGathered] = {};
  uint32_t first_block[kMaxGathered] = {};  // of each tensor; unused entries lie beyond the grid
};

// One thread's view of a tensor.
template <int kWidth>
struct Gathered {
  using Vector = VectorOf<kWidth>::Type;
  static constexpr int kInFlight = in_flight(kWidth);
  const GatherRowsArgs& args;
  const GatheredTensor& tensor;
  const RowPlan& plan;

  __device__ __forceinline__ bool is_slot(int slot) const { return slot >= 0 && slot < args.slots; }

  // Return the slot that a row reads from; -1 after the last row.
  __device__ __forceinline__ int slot_of(int64_t row) const {
    return row < args.rows ? __ldg(args.index + row) : -1;
  }

  __device__ __forceinline__ const unsigned char* slot(int slot) const {
    const auto row = static_cast<uint32_t>(slot) / static_cast<uint32_t>(tensor.columns);
    const uint32_t column = slot - row * tensor.columns;
    return static_cast<const unsigned char*>(tensor.in) + row * tensor.slot_strides[0] +
           column * tensor.slot_strides[1];
  }

  // Return the offset in bytes of a vector in its slot.
  template <bool kWhole>
  __device__ __forceinline__ int64_t offset(uint32_t vector) const {
    if constexpr (kWhole) return static_cast<int64_t>(vector) * kWidth;
    uint32_t chunk = vector / plan.chunk_vectors;
    int64_t bytes = static_cast<int64_t>(vector - chunk * plan.chunk_vectors) * kWidth;
#pragma unroll 1
    for (int dim = 0; dim + 1 < tensor.n_dims; ++dim) {
      const uint32_t outer = chunk / static_cast<uint32_t>(tensor.sizes[dim]);
      bytes += (chunk - outer * tensor.sizes[dim]) * tensor.strides[dim];
      chunk = outer;
    }
    return bytes + chunk * tensor.strides[tensor.n_dims - 1];
  }

  // Return the vector's part of the fill value: an element may be wider than a vector.
  __device__ __forceinline__ Vector fill(uint32_t vector) const {
    return *reinterpret_cast<const Vector*>(tensor.fill + vector % (16 / kWidth) * kWidth);
  }

  __device__ __forceinline__ static Vector load(const unsigned char* from) {
    return *reinterpret_cast<const Vector*>(from);
  }

  __device__ __forceinline__ Vector* row(int64_t row) const {
    return reinterpret_cast<Vector*>(static_cast<unsigned char*>(tensor.out) +
                                     row * tensor.row_bytes);
  }

  __device__ __forceinline__ void short_rows(uint32_t block) const {
    const uint32_t vector = threadIdx.x & ((1u << plan.log_group) - 1);
    const int step = kThreads >> plan.log_group;
    const int64_t first =
        static_cast<int64_t>(block) * step * kShortInFlight + (threadIdx.x >> plan.log_group);
    if (vector >= plan.vectors) return;
    const int64_t inside = tensor.n_dims == 0 ? offset<true>(vector) : offset<false>(vector);
    int slots[kShortInFlight];
#pragma unroll
    for (int i = 0; i < kShortInFlight; ++i) slots[i] = slot_of(first + i * step);
    Vector values[kShortInFlight];
#pragma unroll
    for (int i = 0; i < kShortInFlight; ++i) {
      values[i] = is_slot(slots[i]) ? load(slot(slots[i]) + inside) : fill(vector);
    }
#pragma unroll
    for (int i = 0; i < kShortInFlight; ++i) {
      if (first + i * step < args.rows) row(first + i * step)[vector] = values[i];
    }
  }

  // Copy this lane's vectors of a segment.
  template <bool kWhole>
  __device__ __forceinline__ void copy(const unsigned char* in, Vector* out, uint32_t first) const {
    Vector values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t vector = first + i * kWarpSize;
      if (vector < plan.vectors) values[i] = load(in + offset<kWhole>(vector));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t vector = first + i * kWarpSize;
      if (vector < plan.vectors) out[vector] = values[i];
    }
  }

  __device__ __forceinline__ void long_row(uint32_t block) const {
    const int64_t item = static_cast<int64_t>(block) * kWarps + threadIdx.x / kWarpSize;
    const int64_t number = item / plan.segments;
    if (number >= args.rows) return;
    const uint32_t first =
        static_cast<uint32_t>(item - number * plan.segments) * (kInFlight * kWarpSize) +
        threadIdx.x % kWarpSize;
    const int index = slot_of(number);
    Vector* out = row(number);
    if (!is_slot(index)) {
      const Vector value = fill(first);  // the same for all vectors of this lane
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i * kWarpSize < plan.vectors) out[first + i * kWarpSize] = value;
      }
    } else if (tensor.n_dims == 0) {
      copy<true>(slot(index), out, first);
    } else {
      copy<false>(slot(index), out, first);
    }
  }
};

template <int kWidth>
__device__ __forceinline__ void gather(const GatherPlan& plan, int tensor) {
  const Gathered<kWidth> gathered{plan.args, plan.args.tensors[tensor], plan.rows[tensor]};
  const uint32_t block = blockIdx.x - plan.first_block[tensor];
  if (gathered.plan.vectors <= kWarpSize) {
    gathered.short_rows(block);
  } else {
    gathered.long_row(block);
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherPlan plan) {
  int tensor = 0;
#pragma unroll
  for (int i = 1; i < kMaxGathered; ++i) tensor += blockIdx.x >= plan.first_block[i];
  switch (plan.rows[tensor].width) {
    case 16:
      return gather<16>(plan, tensor);
    case 8:
      return gather<8>(plan, tensor);
    case 4:
      return gather<4>(plan, tensor);
    case 2:
      return gather<2>(plan, tensor);
    default:
      return gather<1>(plan, tensor);
  }
}

// Return the widest vector that divides the chunks and to which every address is aligned.
int width_of(const GatheredTensor& tensor) {
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(tensor.in) |
                  reinterpret_cast<uintptr_t>(tensor.out) | tensor.chunk_bytes |
                  tensor.slot_strides[0] | tensor.slot_strides[1];
  for (int dim = 0; dim < tensor.n_dims; ++dim) bits |= tensor.strides[dim];
  return 1 << std::countr_zero(bits);
}

RowPlan plan_rows(const GatheredTensor& tensor) {
  RowPlan plan;
  plan.width = width_of(tensor);
  plan.vectors = static_cast<uint32_t>(tensor.row_bytes / plan.width);
  plan.chunk_vectors = static_cast<uint32_t>(tensor.chunk_bytes / plan.width);
  plan.segments = static_cast<uint32_t>(ceil_div(plan.vectors, in_flight(plan.width) * kWarpSize));
  while ((1u << plan.log_group) < plan.vectors && plan.log_group < 5) ++plan.log_group;
  return plan;
}

int64_t blocks_of(const RowPlan& plan, int64_t rows) {
  if (plan.vectors > kWarpSize) return ceil_div(rows * plan.segments, kWarps);
  return plan.vectors == 0 ? 0 : ceil_div(rows, (kThreads >> plan.log_group) * kShortInFlight);
}

}  // namespace

void gather_rows(const GatherRowsArgs& args, Stream stream) {
  GatherPlan plan{args};
  int64_t blocks = 0;
  for (int i = 0; i < kMaxGathered; ++i) {
    plan.first_block[i] = static_cast<uint32_t>(blocks);
    if (i >= args.n_tensors) continue;
    plan.rows[i] = plan_rows(args.tensors[i]);
    blocks += blocks_of(plan.rows[i], args.rows);
  }
  if (blocks == 0) return;
  gather_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(plan);
}

}  // namespace cuseq::cuda
