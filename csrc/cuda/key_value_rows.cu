#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"
#include "ops/key_value_rows.h"

// A block for each row: its threads take V consecutive elements at a time.
namespace cuseq::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBytes = 16;  // of a vector

template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherKeyValuesArgs args) {
  using Elements = Vec<T, V>;
  const int64_t source = args.index[blockIdx.x];
  const bool has_source = args.sources.has(source);
  const auto from = args.sources.row<T>(has_source ? source : 0);
  const auto to = KeyValueRow<T>::of(args.out, blockIdx.x);
  const int64_t width = args.key_width + args.value_width;
  for (int64_t at = threadIdx.x * V; at < width; at += kThreads * V) {
    Elements elements = {};
    if (has_source) elements = *reinterpret_cast<const Elements*>(from.at(at, args.key_width));
    *reinterpret_cast<Elements*>(to.at(at, args.key_width)) = elements;
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ SumKeyValuesArgs args) {
  using Sum = Arithmetic<T>;
  using Elements = Vec<T, V>;
  const Terms terms = Terms::of(args, blockIdx.x);
  if (terms.empty()) return;
  const auto to = KeyValueRow<T>::of(args.out, blockIdx.x);
  const int64_t width = args.key_width + args.value_width;
  for (int64_t at = threadIdx.x * V; at < width; at += kThreads * V) {
    Sum sums[V] = {};
    for (int64_t j = terms.begin; j < terms.end; ++j) {
      const int64_t source = args.terms[j];
      if (!args.sources.has(source)) continue;
      const T* from = args.sources.row<T>(source).at(at, args.key_width);
      const Elements term = *reinterpret_cast<const Elements*>(from);
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += convert<Sum>(term.values[i]);
    }
    Elements result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.values[i] = convert<T>(sums[i]);
    *reinterpret_cast<Elements*>(to.at(at, args.key_width)) = result;
  }
}

// Return whether every row of keys and of values starts at a multiple of a vector.
template <typename T, typename Void>
bool is_aligned(const KeyValueRows<Void>& rows) {
  constexpr int kVector = kBytes / sizeof(T);
  const auto starts = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0;
  };
  if (rows.count == 0) return true;
  return starts(rows.keys) && starts(rows.values) && rows.key_stride % kVector == 0 &&
         rows.value_stride % kVector == 0;
}

// Call run.template operator()<T, V>() for the dtype, and for vectors of 16 bytes or, if rows do
// not allow them, of one element.
template <typename Args, typename Run>
void dispatch_vectors(const Args& args, const Run& run) {
  if (args.out.count == 0 || args.key_width + args.value_width == 0) return;
  dispatch_float(args.type, [&]<typename T>() {
    constexpr int kVector = kBytes / sizeof(T);
    const bool vectors = args.key_width % kVector == 0 && args.value_width % kVector == 0 &&
                         is_aligned<T>(args.sources.first) && is_aligned<T>(args.sources.second) &&
                         is_aligned<T>(args.out);
    if (vectors) {
      run.template operator()<T, kVector>();
    } else {
      run.template operator()<T, 1>();
    }
  });
}

}  // namespace

void gather_key_values(const GatherKeyValuesArgs& args, Stream stream) {
  dispatch_vectors(args, [&]<typename T, int V>() {
    gather_kernel<T, V><<<static_cast<unsigned>(args.out.count), kThreads, 0, stream>>>(args);
  });
}

void sum_key_values(const SumKeyValuesArgs& args, Stream stream) {
  dispatch_vectors(args, [&]<typename T, int V>() {
    sum_kernel<T, V><<<static_cast<unsigned>(args.out.count), kThreads, 0, stream>>>(args);
  });
}

}  // namespace cuseq::cuda
