#include "ops/dispatch.h"

#include <c10/util/Exception.h>

namespace cuseq {

#ifdef CUSEQ_WITH_CUDA
void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) {
    const cudaDeviceProp* gpu = at::cuda::getCurrentDeviceProperties();
    TORCH_CHECK(false, "cuseq was built for the CUDA architectures ", CUSEQ_CUDA_ARCHS,
                " and cannot run on ", gpu->name, " (sm_", gpu->major, gpu->minor,
                "): rebuild it with CUSEQ_CUDA_ARCHS=", gpu->major, gpu->minor);
  }
  C10_CUDA_CHECK(error);
}
#else
void built_without_cuda(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name().name,
      " was called with CUDA tensors, but this cuseq was built without CUDA: install a wheel with "
      "CUDA kernels, or the CUDA toolkit that matches torch.version.cuda (nvcc), then build cuseq "
      "again in its source tree, without CUSEQ_CUDA=off: `pip install --force-reinstall --no-deps "
      ".`");
}
#endif

}  // namespace cuseq
