#include "ops/segment_reduce.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/float_types.h"

namespace cuseq::cpu {
namespace {

template <typename T>
void reduce(const SegmentReduceArgs& args, int64_t segment) {
  using A = Arithmetic<T>;
  const auto* values = static_cast<const T*>(args.values);
  A* out = static_cast<A*>(args.out) + segment * args.columns;
  const int64_t begin = std::max<int64_t>(args.segments.seqlens.begin(segment), 0);
  const int64_t end = args.segments.real_end(segment);
  const auto value = [&](int64_t token, int64_t column) {
    return static_cast<A>(values[token * args.columns + column]);
  };
  if (args.kind == Reduction::kMax) {
    int32_t* which = args.which + segment * args.columns;
    std::fill(out, out + args.columns, -std::numeric_limits<A>::infinity());
    std::fill(which, which + args.columns, -1);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t i = 0; i < args.columns; ++i) {
        const A one = value(token, i);
        if (which[i] >= 0 && !(one > out[i] || (std::isnan(one) && !std::isnan(out[i])))) continue;
        out[i] = one;
        which[i] = static_cast<int32_t>(token);
      }
    }
    return;
  }
  std::fill(out, out + args.columns, A{0});
  const int64_t first = args.kind == Reduction::kLast ? std::max(begin, end - 1) : begin;
  for (int64_t token = first; token < end; ++token) {
    for (int64_t i = 0; i < args.columns; ++i) out[i] += value(token, i);
  }
  if (args.kind == Reduction::kMean && end > begin) {
    for (int64_t i = 0; i < args.columns; ++i) out[i] /= static_cast<A>(end - begin);
  }
}

}  // namespace

void segment_reduce(const SegmentReduceArgs& args) {
  dispatch_float(args.type, [&]<typename T>() {
    at::parallel_for(0, args.segments.seqlens.n_seqs, 1, [&](int64_t first, int64_t last) {
      for (int64_t segment = first; segment < last; ++segment) reduce<T>(args, segment);
    });
  });
}

void segment_reduce_backward(const SegmentReduceArgs& args) {
  constexpr int64_t kGrain = 1 << 10;
  dispatch_float(args.type, [&]<typename T>() {
    using A = Arithmetic<T>;
    at::parallel_for(0, args.segments.total_tokens, kGrain, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) {
        T* grad = static_cast<T*>(args.grad_values) + token * args.columns;
        const int64_t segment = args.segments.seqlens.segment_of(token);
        const bool is_real = args.segments.is_real(token, segment);
        for (int64_t i = 0; i < args.columns; ++i) {
          grad[i] = is_real ? static_cast<T>(spread_gradient<A>(args, token, segment, i)) : T(0);
        }
      }
    });
  });
}

}  // namespace cuseq::cpu
