#include "cuda/rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows of a warp, whose loads are all in flight before the first of them is turned, and blocks of
// full size that a multiprocessor has registers for: more rows would save work on angles, fewer
// leave room for more warps. Measured on an H200; a register too few costs more than either.
template <typename T>
inline constexpr int kRows = sizeof(T) <= 4 ? 2 : 1;
template <typename T, int V>
inline constexpr int kBlocks = V == 8 ? 5 : (sizeof(T) <= 4 ? 3 : 2);

template <typename T, int V, bool kInterleaved, bool kDirect>
__global__ void __launch_bounds__(kMaxThreads, kBlocks<T, V>)
    apply_rope_kernel(const __grid_constant__ RopeArgs args,
                      const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Lane lane = Lane::of(args, geometry, blockIdx.x);
  if (lane.token >= geometry.tokens || lane.rows <= 0) return;  // the whole warp

  Item<V> items[kItems];
  find_items(lane.lane_of_group, args, geometry, items);
  const TensorPlan& tensor = geometry.tensors[lane.tensor];
  const Rows inputs = Rows::of(tensor.in, lane);
  const Rows outputs = Rows::of(tensor.out, lane);
  Pair<T, V> data[kRows<T>][kItems];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    const bool served = lane.head(r) < tensor.heads;
#pragma unroll
    for (int i = 0; i < kItems; ++i) data[r][i].load(inputs.head<const T>(r), items[i], served);
  }
  Angles<T, V, kInterleaved> angles[kItems];  // while the loads are on their way
  load_angles<kDirect>(args, lane, items, args.conjugate, reinterpret_cast<A*>(shared_memory),
                       angles);
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    const bool served = lane.head(r) < tensor.heads;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].turns) {
        A a[V], b[V];
        data[r][i].get(a, b);
        angles[i].turn(a, b);
        data[r][i].set(a, b);
      }
      data[r][i].store(outputs.head<T>(r), items[i], served);
    }
  }
}

bool all_in_place(const RopeArgs& args) {
  return args.tensors[0].in == args.tensors[0].out && args.tensors[1].in == args.tensors[1].out;
}

}  // namespace

void apply_rope(const RopeArgs& args, Stream stream) {
  if (has_no_work(args)) return;
  dispatch_rope(args, [&]<typename T, int V, bool kInterleaved, bool kDirect>() {
    const RopeGeometry geometry = rope_geometry(args, V, kRows<T>, !all_in_place(args));
    using A = Arithmetic<T>;
    const size_t shared = angle_elements<A, kDirect>(args, geometry) * sizeof(A);
    apply_rope_kernel<T, V, kInterleaved, kDirect>
        <<<blocks_of(geometry), threads_of(geometry), shared, stream>>>(args, geometry);
  });
}

}  // namespace cuseq::cuda
