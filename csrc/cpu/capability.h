#pragma once

// Files named *_simd.cpp are compiled once for the baseline instruction set and, on x86, once more
// for AVX2, each into a namespace of its own: rotations are 2 to 26 times as fast by AVX2, and
// convolutions 1.7 to 10 times.
namespace cuseq::cpu {

// Return whether PyTorch uses AVX2 or wider vectors here; ATEN_CPU_CAPABILITY=default disables it.
bool has_avx2();

}  // namespace cuseq::cpu

#ifdef CUSEQ_WITH_AVX2
#define CUSEQ_RUN_SIMD(kernel, args) \
  (cuseq::cpu::has_avx2() ? cuseq::cpu::avx2::kernel(args) : cuseq::cpu::baseline::kernel(args))
#else
#define CUSEQ_RUN_SIMD(kernel, args) cuseq::cpu::baseline::kernel(args)
#endif
