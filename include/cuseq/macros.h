#pragma once

// CUSEQ_API marks what other binaries (the Python module, the tests, a C++ program) may call: the
// library is built with hidden visibility, so anything else cannot be reached by accident.
#if defined(_WIN32)
#define CUSEQ_API
#else
#define CUSEQ_API __attribute__((visibility("default")))
#endif

// Arithmetic shared by CPU code, CUDA kernels and the torch-free unit tests.
#if defined(__CUDACC__)
#define CUSEQ_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CUSEQ_HOST_DEVICE inline
#endif
