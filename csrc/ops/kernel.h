#pragma once

// What a kernel sees: pointers and small structs, no torch. Each kernel has one CPU and one CUDA
// form of the same name, in csrc/cpu/NAME.cpp and csrc/cuda/NAME.cu, both declared with their
// arguments in csrc/ops/NAME.h. Every form stays inside the tensors described there whatever values
// they hold.

struct CUstream_st;

namespace cuseq {

using Stream = CUstream_st*;

}  // namespace cuseq
