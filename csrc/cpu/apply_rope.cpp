#include "cpu/capability.h"
#include "cpu/rope_simd.h"

namespace cuseq::cpu {

void apply_rope(const RopeArgs& args) { CUSEQ_RUN_SIMD(apply_rope, args); }

}  // namespace cuseq::cpu
