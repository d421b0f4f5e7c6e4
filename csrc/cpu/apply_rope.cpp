#include <ATen/Version.h>

#include "cpu/rope_simd.h"

namespace cuseq::cpu {

bool has_avx2() {
  static const bool has = at::get_cpu_capability().rfind("AVX", 0) == 0;
  return has;
}

void apply_rope(const RopeArgs& args) { CUSEQ_RUN_SIMD(apply_rope, args); }

}  // namespace cuseq::cpu
