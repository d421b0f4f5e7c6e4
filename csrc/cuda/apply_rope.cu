#include "cuda/plain_rope.cuh"

namespace cuseq::cuda {
namespace {

// Rows per warp, whose loads are all in flight before the first row is rotated, and full-size
// blocks per multiprocessor, which bound the registers. More rows save work on angles, fewer leave
// room for more warps. Measured on an H200; a register too few costs more than either.
template <typename T>
inline constexpr int kRows = sizeof(T) <= 4 ? 2 : 1;
template <typename T, int V>
inline constexpr int kBlocks = V == 8 ? 5 : (sizeof(T) <= 4 ? 3 : 2);

// The same for plain calls. The larger number of rows is for calls whose warps then run at a time,
// which is near 1,024 tokens of 48 heads of 128, or 2,048 of 24: 6 % faster there.
constexpr int kPlainRows = 3;
constexpr int kManyPlainRows = 4;
constexpr int kPlainRegisters = 64;

template <typename T, int V, bool kInterleaved, Path kPath>
__global__ void __launch_bounds__(kMaxThreads, kBlocks<T, V>)
    apply_rope_kernel(const __grid_constant__ RopeArgs args,
                      const __grid_constant__ RopeGeometry geometry) {
  using A = Arithmetic<T>;
  constexpr int kItems = kItemsPerLane<V>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Lane lane = Lane::of<kPath>(args, geometry, blockIdx.x);
  if (lane.token >= geometry.tokens || lane.rows <= 0) return;  // uniform in the warp
  const auto asked = AskedPosition::of<kPath>(args.positions, lane);

  Item<V> items[kItems];
  find_items<kPath>(lane.lane_of_group, args, geometry, items);
  const TensorPlan& tensor = geometry.tensors[lane.tensor];
  const Rows inputs = Rows::of<kPath>(tensor.in, lane);
  const Rows outputs = Rows::of<kPath>(tensor.out, lane);
  Pair<T, V> data[kRows<T>][kItems];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    const bool served = lane.head(r) < tensor.heads;
#pragma unroll
    for (int i = 0; i < kItems; ++i) data[r][i].load(inputs.head<const T>(r), items[i], served);
  }
  Angles<T, V, kInterleaved> angles[kItems];  // loaded while the rows are in flight
  load_angles<kPath>(args, lane, asked, items, args.inverse, reinterpret_cast<A*>(shared_memory),
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

template <typename T, int V, bool kInterleaved, Path kPath>
void launch(const RopeArgs& args, Stream stream) {
  const RopeGeometry geometry = rope_geometry(args, V, kRows<T>, !all_in_place(args));
  using A = Arithmetic<T>;
  const size_t shared = angle_elements<A, kPath>(args, geometry) * sizeof(A);
  apply_rope_kernel<T, V, kInterleaved, kPath>
      <<<blocks_of(geometry), threads_of(geometry), shared, stream>>>(args, geometry);
}

template <typename T, int V, int kRows>
void launch_plain(const RopeArgs& args, Stream stream) {
  const RopeGeometry geometry = rope_geometry(args, V, kRows, /*copies=*/false);
  const PlainRope plain = plain_rope(args, geometry, args.inverse);
  dispatch_plain<T>(args, [&]<typename Table, PlainSource kSource>() {
    plain_rope_kernel<T, Table, kSource, /*kNorm=*/false, kRows, kPlainRegisters>
        <<<blocks_of(geometry), threads_of(geometry), 0, stream>>>(plain);
  });
}

}  // namespace

void apply_rope(const RopeArgs& args, Stream stream) {
  if (has_no_work(args)) return;
  dispatch_rope(args, [&]<typename T, int V, bool kInterleaved, Path kPath>() {
    if constexpr (kPath == Path::kPlain) {
      const auto is_one_wave = [&](int rows) {
        return is_short(args, V, rows, kPlainRegisters, /*waves=*/1);
      };
      if (!is_one_wave(kPlainRows) && is_one_wave(kManyPlainRows)) {
        return launch_plain<T, V, kManyPlainRows>(args, stream);
      }
      launch_plain<T, V, kPlainRows>(args, stream);
    } else {
      launch<T, V, kInterleaved, kPath>(args, stream);
    }
  });
}

}  // namespace cuseq::cuda
