#include "packing/permutation.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace cuseq {
namespace {

at::Tensor permutation_kernel(int64_t n, int64_t seed, int64_t begin, int64_t end) {
  TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= n,
                    "begin and end must satisfy 0 <= begin <= end <= n = ", n, ", got ", begin,
                    " and ", end);
  const packing::Permutation permutation(n, static_cast<uint64_t>(seed));
  at::Tensor out = at::empty({end - begin}, at::TensorOptions().dtype(at::kLong));
  auto* values = out.mutable_data_ptr<int64_t>();
  for (int64_t i = begin; i < end; ++i) values[i - begin] = permutation(i);
  return out;
}

}  // namespace

// Without tensors among its arguments there is no device to choose a kernel by.
TORCH_LIBRARY_IMPL(cuseq, CompositeExplicitAutograd, m) {
  m.impl("permutation", TORCH_FN(permutation_kernel));
}

}  // namespace cuseq
