#include "ops/pair_rows.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "cpu/float_types.h"

namespace cuseq::cpu {
namespace {

constexpr int64_t kGrainRows = 64;

// Call run.template operator()<T, S>() for the dtypes of the part and of the sum.
template <typename Run>
void dispatch_sum(FloatType type, FloatType sum_type, const Run& run) {
  dispatch_float(type, [&]<typename T>() {
    if (sum_type == type) {
      run.template operator()<T, T>();
    } else {
      run.template operator()<T, float>();
    }
  });
}

template <typename T, typename S>
void merge_row(const MergeRowsArgs& args, int64_t row) {
  using A = Arithmetic<T>;
  for (int64_t head = 0; head < args.heads; ++head) {
    A& logsumexp = static_cast<A*>(args.logsumexp)[head * args.stride + row];
    const A other = static_cast<const A*>(args.part_logsumexp)[head * args.part_stride + row];
    if (other == -std::numeric_limits<A>::infinity()) continue;
    const A most = std::max(logsumexp, other);
    const A total = most + std::log(std::exp(logsumexp - most) + std::exp(other - most));
    const A keep = std::exp(logsumexp - total), take = std::exp(other - total);
    S* out = static_cast<S*>(args.out) + (row * args.heads + head) * args.dim;
    const T* part = static_cast<const T*>(args.part) + (row * args.heads + head) * args.dim;
    for (int64_t i = 0; i < args.dim; ++i) {
      out[i] = static_cast<S>(keep * static_cast<A>(out[i]) + take * static_cast<A>(part[i]));
    }
    logsumexp = total;
  }
}

}  // namespace

void merge_rows(const MergeRowsArgs& args) {
  dispatch_sum(args.type, args.sum_type, [&]<typename T, typename S>() {
    at::parallel_for(0, args.count, kGrainRows, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        if (args.rows.has(row)) merge_row<T, S>(args, row);
      }
    });
  });
}

void add_rows(const AddRowsArgs& args) {
  dispatch_sum(args.type, args.sum_type, [&]<typename T, typename S>() {
    using A = Arithmetic<T>;
    at::parallel_for(0, args.count, kGrainRows, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        if (!args.rows.has(row)) continue;
        S* sum = static_cast<S*>(args.sum) + row * args.width;
        const T* part = static_cast<const T*>(args.part) + row * args.width;
        for (int64_t i = 0; i < args.width; ++i) {
          sum[i] = static_cast<S>(static_cast<A>(sum[i]) + static_cast<A>(part[i]));
        }
      }
    });
  });
}

}  // namespace cuseq::cpu
