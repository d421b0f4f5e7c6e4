#pragma once

#include "ops/rope.h"

// The rotations of csrc/cpu/rope_simd.cpp. That file is compiled once for the baseline instruction
// set and, on x86, once more for AVX2.
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

// Return whether PyTorch uses AVX2 or wider vectors here; ATEN_CPU_CAPABILITY=default disables it.
bool has_avx2();

}  // namespace cuseq::cpu

#ifdef CUSEQ_WITH_AVX2
#define CUSEQ_RUN_SIMD(kernel, args) \
  (cuseq::cpu::has_avx2() ? cuseq::cpu::avx2::kernel(args) : cuseq::cpu::baseline::kernel(args))
#else
#define CUSEQ_RUN_SIMD(kernel, args) cuseq::cpu::baseline::kernel(args)
#endif
