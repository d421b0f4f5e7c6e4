#include "cpu/capability.h"

#include <ATen/Version.h>

namespace cuseq::cpu {

bool has_avx2() {
  static const bool has = at::get_cpu_capability().rfind("AVX", 0) == 0;
  return has;
}

}  // namespace cuseq::cpu
