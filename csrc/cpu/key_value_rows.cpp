#include "ops/key_value_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "cpu/float_types.h"

namespace cuseq::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;

// Call run(first, last) for parts of the rows, in parallel.
template <typename Args, typename Run>
void for_rows(const Args& args, const Run& run) {
  const int64_t width = std::max<int64_t>(1, args.key_width + args.value_width);
  at::parallel_for(0, args.out.count, std::max<int64_t>(1, kGrainElements / width), run);
}

template <typename T>
void gather(const GatherKeyValuesArgs& args) {
  for_rows(args, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto to = KeyValueRow<T>::of(args.out, i);
      const int64_t source = args.index[i];
      if (!args.sources.has(source)) {
        std::fill_n(to.keys, args.key_width, T(0));
        std::fill_n(to.values, args.value_width, T(0));
        continue;
      }
      const auto from = args.sources.row<T>(source);
      std::copy_n(from.keys, args.key_width, to.keys);
      std::copy_n(from.values, args.value_width, to.values);
    }
  });
}

template <typename T>
void sum(const SumKeyValuesArgs& args) {
  using Sum = Arithmetic<T>;
  for_rows(args, [&](int64_t first, int64_t last) {
    std::vector<Sum> sums(args.key_width + args.value_width);
    Sum* const value_sums = sums.data() + args.key_width;
    for (int64_t row = first; row < last; ++row) {
      const Terms terms = Terms::of(args, row);
      if (terms.empty()) continue;
      std::fill(sums.begin(), sums.end(), Sum(0));
      for (int64_t j = terms.begin; j < terms.end; ++j) {
        if (!args.sources.has(args.terms[j])) continue;
        const auto from = args.sources.row<T>(args.terms[j]);
        for (int64_t i = 0; i < args.key_width; ++i) sums[i] += static_cast<Sum>(from.keys[i]);
        for (int64_t i = 0; i < args.value_width; ++i) {
          value_sums[i] += static_cast<Sum>(from.values[i]);
        }
      }
      const auto to = KeyValueRow<T>::of(args.out, row);
      for (int64_t i = 0; i < args.key_width; ++i) to.keys[i] = static_cast<T>(sums[i]);
      for (int64_t i = 0; i < args.value_width; ++i) to.values[i] = static_cast<T>(value_sums[i]);
    }
  });
}

}  // namespace

void gather_key_values(const GatherKeyValuesArgs& args) {
  dispatch_float(args.type, [&]<typename T>() { gather<T>(args); });
}

void sum_key_values(const SumKeyValuesArgs& args) {
  dispatch_float(args.type, [&]<typename T>() { sum<T>(args); });
}

}  // namespace cuseq::cpu
