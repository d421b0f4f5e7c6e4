#include "packing/permutation.h"

#include <ATen/ops/empty.h>

#include "ops/types.h"
#include "planning/planning.h"

namespace cuseq {

Tensor permutation(int64_t n, int64_t seed, int64_t begin, int64_t end) {
  TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= n,
                    "begin and end must satisfy 0 <= begin <= end <= n = ", n, ", got ", begin,
                    " and ", end);
  const packing::Permutation order(n, static_cast<uint64_t>(seed));
  Tensor out = at::empty({end - begin}, at::TensorOptions().dtype(at::kLong));
  auto* values = out.mutable_data_ptr<int64_t>();
  for (int64_t i = begin; i < end; ++i) values[i - begin] = order(i);
  return out;
}

}  // namespace cuseq
