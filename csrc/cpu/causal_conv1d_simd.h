#pragma once

#include "ops/causal_conv1d.h"

// The convolution of csrc/cpu/causal_conv1d_simd.cpp, for each instruction set that it is compiled
// for.
namespace cuseq::cpu {

#define CUSEQ_DECLARE_CONV_SIMD(capability)                  \
  namespace capability {                                     \
  void causal_conv1d(const ConvArgs& args);                  \
  void causal_conv1d_backward(const ConvBackwardArgs& args); \
  }

CUSEQ_DECLARE_CONV_SIMD(baseline)
CUSEQ_DECLARE_CONV_SIMD(avx2)
#undef CUSEQ_DECLARE_CONV_SIMD

}  // namespace cuseq::cpu
