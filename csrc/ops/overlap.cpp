#include "ops/overlap.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "ops/types.h"

namespace cuseq {
namespace {

// The values steps * stride for every number of steps in [least, most].
struct Term {
  int64_t stride;
  int64_t least;
  int64_t most;
};

using Terms = c10::SmallVector<Term, 8>;

// A search for steps of all terms whose sum is a given distance. Terms are visited by descending
// stride. Each allows only the few steps that the terms with shorter strides can still complete,
// usually one or two.
class Search {
 public:
  explicit Search(Terms terms) : terms_(std::move(terms)) {
    std::ranges::sort(terms_, [](const Term& a, const Term& b) { return a.stride > b.stride; });
    low_.resize(terms_.size() + 1, 0);
    high_.resize(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i > 0; --i) {
      const Term& term = terms_[i - 1];
      low_[i - 1] = low_[i] + term.least * term.stride;
      high_[i - 1] = high_[i] + term.most * term.stride;
    }
  }

  // Return whether the distance can be reached. Also return true if the strides are so entangled
  // that the search would take too long.
  bool reaches(int64_t distance, bool without_standing_still) {
    return from(0, distance, without_standing_still);
  }

 private:
  bool from(size_t i, int64_t distance, bool must_move) {
    if (distance < low_[i] || distance > high_[i]) return false;
    if (i == terms_.size()) return !must_move;
    if (++visited_ > kMostVisited) return true;
    const Term& term = terms_[i];
    // The rest must lie in [low_, high_] of the shorter strides.
    const int64_t first = std::max(term.least, ceil_of(distance - high_[i + 1], term.stride));
    const int64_t last = std::min(term.most, floor_of(distance - low_[i + 1], term.stride));
    for (int64_t steps = first; steps <= last; ++steps) {
      if (from(i + 1, distance - steps * term.stride, must_move && steps == 0)) return true;
    }
    return false;
  }

  static int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
  static int64_t ceil_of(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

  static constexpr int64_t kMostVisited = 100'000;

  Terms terms_;
  c10::SmallVector<int64_t, 9> low_;  // least sum of the terms from here on
  c10::SmallVector<int64_t, 9> high_;
  int64_t visited_ = 0;
};

// Return the number of elements from the first to the last of the tensor, both included.
int64_t span_of(const Tensor& tensor) {
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return span;
}

}  // namespace

bool overlaps_itself(const Tensor& tensor) {
  if (tensor.numel() < 2 || tensor.is_non_overlapping_and_dense()) return false;
  Terms terms;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t most = tensor.size(dim) - 1;
    if (most == 0) continue;
    if (tensor.stride(dim) == 0) return true;
    terms.push_back({tensor.stride(dim), -most, most});
  }
  return Search(std::move(terms)).reaches(0, /*without_standing_still=*/true);
}

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.device() != b.device()) return false;
  const auto first_of = [](const Tensor& tensor) {
    return reinterpret_cast<intptr_t>(tensor.const_data_ptr());
  };
  const auto size = static_cast<int64_t>(a.element_size());
  const int64_t bytes = first_of(b) - first_of(a);
  if (bytes >= span_of(a) * size || -bytes >= span_of(b) * size) return false;
  if (bytes % size != 0) return true;  // elements that partly overlap
  Terms terms;
  const auto add = [&](int64_t stride, int64_t least, int64_t most) {
    if (stride == 0 || least == most) return;
    // Steps along a stride that both tensors have are one difference: merge them into one term.
    const auto same = std::ranges::find(terms, stride, &Term::stride);
    if (same == terms.end()) {
      terms.push_back({stride, least, most});
    } else {
      same->least += least;
      same->most += most;
    }
  };
  for (int64_t dim = 0; dim < a.dim(); ++dim) add(a.stride(dim), 0, a.size(dim) - 1);
  for (int64_t dim = 0; dim < b.dim(); ++dim) add(b.stride(dim), 1 - b.size(dim), 0);
  return Search(std::move(terms)).reaches(bytes / size, /*without_standing_still=*/false);
}

}  // namespace cuseq
