#include "cuda/launch.cuh"
#include "ops/mask_boundary_labels.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) mask_labels_kernel(const BoundaryLabelsArgs args) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= args.segments.total_tokens) return;
  static_cast<T*>(args.out)[token] = args.segments.label_crosses_boundary(token, args.shift)
                                         ? static_cast<T>(args.ignore_index)
                                         : static_cast<const T*>(args.labels)[token];
}

}  // namespace

void mask_boundary_labels(const BoundaryLabelsArgs& args, Stream stream) {
  if (args.segments.total_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(args.segments.total_tokens, kThreads));
  if (args.is_int64) {
    mask_labels_kernel<int64_t><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    mask_labels_kernel<int32_t><<<blocks, kThreads, 0, stream>>>(args);
  }
}

}  // namespace cuseq::cuda
