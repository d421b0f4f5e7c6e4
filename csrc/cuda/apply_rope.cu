#include "cuda/rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows of a warp, whose loads are all in flight before the first of them is turned, and blocks of
// full size that a multiprocessor has registers for: more rows would save work on angles, fewer
// would leave room for more warps. Measured on an H200.
template <typename T>
inline constexpr int kRows = sizeof(T) == 2 ? 3 : (sizeof(T) == 4 ? 2 : 1);
constexpr int kBlocks = 4;

template <typename T, int V, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    apply_rope_kernel(const __grid_constant__ RopeArgs args,
                      const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Lane lane = Lane::of(args, geometry, blockIdx.x);
  if (lane.token >= static_cast<uint32_t>(args.batch * args.tokens)) return;
  const int pairs = static_cast<int>(args.rotary_dim) / 2;
  A* cos = reinterpret_cast<A*>(shared_memory) + lane.warp * 2 * pairs;
  A* sin = cos + pairs;

  Item<V> items[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    items[i] = Item<V>::of(lane.lane_of_group + (i << geometry.log_group), args, geometry);
  }
  const auto inputs = inputs_of<T>(args, lane);
  const auto outputs = outputs_of<T>(args, lane);
  Pair<T, V> data[kRows<T>][kItems];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) data[r][i].load(inputs[r], items[i], lane.serves(args, r));
  }
  stage_angles(args, lane, args.conjugate, cos, sin);  // while the loads are on their way
  Angles<V, kInterleaved, A> angles[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    angles[i] = Angles<V, kInterleaved, A>::of(args, items[i], cos, sin);
  }
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].turns) {
        A a[V], b[V];
        data[r][i].get(a, b);
        angles[i].turn(a, b);
        data[r][i].set(a, b);
      }
      data[r][i].store(outputs[r], items[i], lane.serves(args, r));
    }
  }
}

bool all_in_place(const RopeArgs& args) {
  return args.tensors[0].in == args.tensors[0].out && args.tensors[1].in == args.tensors[1].out;
}

}  // namespace

void apply_rope(const RopeArgs& args, Stream stream) {
  if (has_no_work(args)) return;
  dispatch_rope(args, [&]<typename T, int V, bool kInterleaved>() {
    const RopeGeometry geometry = rope_geometry(args, V, kRows<T>, !all_in_place(args));
    apply_rope_kernel<T, V, kInterleaved>
        <<<blocks_of(geometry), threads_of(geometry), angle_bytes<Arithmetic<T>>(args, geometry),
           stream>>>(args, geometry);
  });
}

}  // namespace cuseq::cuda
