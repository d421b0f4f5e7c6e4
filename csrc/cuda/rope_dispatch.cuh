#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/rope_angles.cuh"

// Choice of the kernel instantiation for the arguments.
namespace cuseq::cuda {

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

// Return whether lanes can read their angles from the table in vectors, each within one plane.
inline bool angles_fit(const RopeArgs& args, int elements) {
  const RopeTable& table = args.table;
  const int64_t size = size_of(table.dtype);
  const int64_t pairs = args.interleaved ? elements / 2 : elements;  // per vector
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

// Return whether kPlain applies: the whole head rotates (rotary_dim is head_dim), by one plane; its
// vectors, a power of two, fill a group of lanes exactly; tokens and their position ids or table
// rows are flat (is_flat()); and there is no context parallelism.
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
  // Table rows and position ids are [batch, token]: pass them to is_flat() with a head stride of 0.
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

// dispatch_rope() calls run.template operator()<T, V, kInterleaved, kPath>() for the dtype, the
// widest vectors that fit (16 bytes, two elements or one) and the path. `fits(elements)` and
// `plain(elements)` say whether the kernel's other arguments allow kDirect and kPlain with such
// vectors. A vector of one element holds no pair, so there the kernel reads args.interleaved at run
// time.
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
