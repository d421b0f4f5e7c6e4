#include <algorithm>

#include "cpu/capability.h"
#include "cpu/rope_simd.h"

namespace cuseq::cpu {

void apply_qk_norm_rope(const QkNormRopeArgs& args) { CUSEQ_RUN_SIMD(apply_qk_norm_rope, args); }

// Depends only on the number of tokens, so that sums do not change with the number of threads.
int64_t qk_norm_rope_partials(const QkNormRopeArgs& args) {
  constexpr int64_t kTokens = 64;
  return std::clamp<int64_t>(args.rope.batch * args.rope.tokens / kTokens, 1, 64);
}

void apply_qk_norm_rope_backward(const QkNormRopeArgs& args) {
  CUSEQ_RUN_SIMD(apply_qk_norm_rope_backward, args);
}

}  // namespace cuseq::cpu
