#pragma once

#include "ops/rope.h"

// The rotations of csrc/cpu/rope_simd.cpp, for each instruction set that it is compiled for.
namespace cuseq::cpu {

#define CUSEQ_DECLARE_ROPE_SIMD(capability)                     \
  namespace capability {                                        \
  void apply_rope(const RopeArgs& args);                        \
  void apply_qk_norm_rope(const QkNormRopeArgs& args);          \
  void apply_qk_norm_rope_backward(const QkNormRopeArgs& args); \
  }

CUSEQ_DECLARE_ROPE_SIMD(baseline)
CUSEQ_DECLARE_ROPE_SIMD(avx2)
#undef CUSEQ_DECLARE_ROPE_SIMD

}  // namespace cuseq::cpu
