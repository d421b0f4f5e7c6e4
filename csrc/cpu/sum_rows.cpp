#include "ops/sum_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "cpu/float_types.h"

namespace cuseq::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;

template <typename T>
void sum(const SumRowsArgs& args) {
  using Sum = Arithmetic<T>;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.elements));
  at::parallel_for(0, args.num_rows, grain, [&](int64_t first, int64_t last) {
    std::vector<Sum> sums(args.elements);
    for (int64_t row = first; row < last; ++row) {
      std::fill(sums.begin(), sums.end(), Sum(0));
      const Terms terms = Terms::of(args, row);
      for (int64_t j = terms.begin; j < terms.end; ++j) {
        const T* from = row_of_term<T>(args, args.terms[j]);
        if (from == nullptr) continue;
        for (int64_t i = 0; i < args.elements; ++i) sums[i] += static_cast<Sum>(from[i]);
      }
      T* to = static_cast<T*>(args.out) + row * args.elements;
      for (int64_t i = 0; i < args.elements; ++i) to[i] = static_cast<T>(sums[i]);
    }
  });
}

}  // namespace

void sum_rows(const SumRowsArgs& args) {
  dispatch_float(args.type, [&]<typename T>() { sum<T>(args); });
}

}  // namespace cuseq::cpu
