#pragma once

#include <torch/library.h>

// Registers one block of kernels where the library can run them: CPU, and CUDA where it was built
// for it. A build without CUDA answers CUDA calls in csrc/ops/no_cuda.cpp.
#ifdef CUSEQ_WITH_CUDA
#define CUSEQ_REGISTER(m)                                     \
  static void register_kernels(torch::Library& m);            \
  TORCH_LIBRARY_IMPL(cuseq, CPU, m) { register_kernels(m); }  \
  TORCH_LIBRARY_IMPL(cuseq, CUDA, m) { register_kernels(m); } \
  static void register_kernels(torch::Library& m)
#else
#define CUSEQ_REGISTER(m)                                    \
  static void register_kernels(torch::Library& m);           \
  TORCH_LIBRARY_IMPL(cuseq, CPU, m) { register_kernels(m); } \
  static void register_kernels(torch::Library& m)
#endif
