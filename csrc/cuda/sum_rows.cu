#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"
#include "ops/sum_rows.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 128;

// A block for each row: its threads take V consecutive elements at a time, term after term.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ SumRowsArgs args) {
  using Sum = Arithmetic<T>;
  using Elements = Vec<T, V>;
  const int64_t row = blockIdx.x;
  const Terms terms = Terms::of(args, row);
  for (int64_t at = threadIdx.x * V; at < args.elements; at += kThreads * V) {
    Sum sums[V] = {};
    for (int64_t j = terms.begin; j < terms.end; ++j) {
      const T* from = row_of_term<T>(args, args.terms[j]);
      if (from == nullptr) continue;
      const Elements term = *reinterpret_cast<const Elements*>(from + at);
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += convert<Sum>(term.values[i]);
    }
    Elements result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.values[i] = convert<T>(sums[i]);
    *reinterpret_cast<Elements*>(static_cast<T*>(args.out) + row * args.elements + at) = result;
  }
}

template <typename T>
void launch(const SumRowsArgs& args, Stream stream) {
  constexpr int kBytes = 16;
  constexpr int kVector = kBytes / sizeof(T);
  const auto is_aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0;
  };
  const bool vectors = args.elements % kVector == 0 && is_aligned(args.first) &&
                       is_aligned(args.second) && is_aligned(args.out);
  const auto blocks = static_cast<unsigned>(args.num_rows);
  if (vectors) {
    sum_rows_kernel<T, kVector><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    sum_rows_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(args);
  }
}

}  // namespace

void sum_rows(const SumRowsArgs& args, Stream stream) {
  if (args.num_rows == 0 || args.elements == 0) return;
  dispatch_float(args.type, [&]<typename T>() { launch<T>(args, stream); });
}

}  // namespace cuseq::cuda
