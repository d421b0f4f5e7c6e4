#include <ATen/Parallel.h>

#include "cuseq/seqlens.h"
#include "ops/mask_boundary_labels.h"

namespace cuseq::cpu {
namespace {

template <typename T>
void mask(const BoundaryLabelsArgs& args) {
  const T* labels = static_cast<const T*>(args.labels);
  T* out = static_cast<T*>(args.out);
  constexpr int64_t kGrain = 1 << 13;
  at::parallel_for(0, args.segments.total_tokens, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      out[token] = args.segments.label_crosses_boundary(token, args.shift)
                       ? static_cast<T>(args.ignore_index)
                       : labels[token];
    }
  });
}

}  // namespace

void mask_boundary_labels(const BoundaryLabelsArgs& args) {
  args.is_int64 ? mask<int64_t>(args) : mask<int32_t>(args);
}

}  // namespace cuseq::cpu
