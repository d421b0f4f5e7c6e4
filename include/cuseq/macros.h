#pragma once

// CUSEQ_API exports a symbol to other binaries (the Python module, the tests, a C++ program). The
// library is built with hidden visibility, so nothing else can be called by accident.
#if defined(_WIN32)
#define CUSEQ_API
#else
#define CUSEQ_API __attribute__((visibility("default")))
#endif

// Marks arithmetic shared by CPU code, CUDA kernels and the torch-free unit tests.
#if defined(__CUDACC__)
#define CUSEQ_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CUSEQ_HOST_DEVICE inline
#endif
