#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#ifdef CUSEQ_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#endif

// Helpers to look up an op, to run its kernel and to register it.
namespace cuseq {

// Return the op with this schema name, such as "cuseq::cu_seqlens". Look it up only once: `static
// const auto op`.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

#ifdef CUSEQ_WITH_CUDA
// Raise the error of the last kernel launch, if any.
void check_launch();

// Run cpu::kernel(args) or cuda::kernel(args, stream), depending on the tensor's device.
#define CUSEQ_RUN(kernel, where, args)                               \
  do {                                                               \
    if ((where).is_cuda()) {                                         \
      const c10::cuda::CUDAGuard guard((where).device());            \
      cuda::kernel(args, at::cuda::getCurrentCUDAStream().stream()); \
      check_launch();                                                \
    } else {                                                         \
      cpu::kernel(args);                                             \
    }                                                                \
  } while (false)

#else
#define CUSEQ_RUN(kernel, where, args) cpu::kernel(args)

// Raise NotImplementedError with instructions to build the CUDA kernels.
void built_without_cuda(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack);
#endif

// Registers kernels for one device.
class Registry {
 public:
  Registry(torch::Library& library, c10::DispatchKey device) : library_(library), device_(device) {}

  template <typename Kernel>
  void impl(const char* name, const Kernel& kernel) const {
#ifndef CUSEQ_WITH_CUDA
    if (device_ == c10::DispatchKey::CUDA) {
      library_.impl(name, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
      return;
    }
#endif
    library_.impl(name, kernel);
  }

 private:
  torch::Library& library_;
  [[maybe_unused]] c10::DispatchKey device_;
};

// Register one block of `m.impl(NAME, KERNEL)` for the CPU and for CUDA. In a build without CUDA,
// calling these ops with CUDA tensors raises an error that explains how to build the kernels.
#define CUSEQ_REGISTER(m) CUSEQ_REGISTER_BY(m, C10_ANONYMOUS_VARIABLE(register_kernels_))
#define CUSEQ_REGISTER_BY(m, block)                                                      \
  static void block(const cuseq::Registry& m);                                           \
  TORCH_LIBRARY_IMPL(cuseq, CPU, library) { block({library, c10::DispatchKey::CPU}); }   \
  TORCH_LIBRARY_IMPL(cuseq, CUDA, library) { block({library, c10::DispatchKey::CUDA}); } \
  static void block(const cuseq::Registry& m)

}  // namespace cuseq
