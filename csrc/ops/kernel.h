#pragma once

// The interface of kernels: pointers and small structs, no torch. Each kernel has a CPU and a CUDA
// implementation of the same name, in csrc/cpu/NAME.cpp and csrc/cuda/NAME.cu. Both are declared
// with their arguments in csrc/ops/NAME.h. Every implementation stays inside the tensors described
// there whatever values they hold.

struct CUstream_st;

namespace cuseq {

using Stream = CUstream_st*;

}  // namespace cuseq
