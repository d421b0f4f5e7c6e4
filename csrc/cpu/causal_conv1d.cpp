#include "cpu/causal_conv1d_simd.h"

#include <algorithm>

#include "cpu/capability.h"

namespace cuseq::cpu {

void causal_conv1d(const ConvArgs& args) { CUSEQ_RUN_SIMD(causal_conv1d, args); }

// Depends only on the number of tokens, so that sums do not change with the number of threads.
int64_t conv_partials(const ConvBackwardArgs& args) {
  constexpr int64_t kTokens = 128;
  const ConvSequences& sequences = args.conv.sequences;
  return std::clamp<int64_t>(sequences.batch * sequences.tokens / kTokens, 1, 64);
}

void causal_conv1d_backward(const ConvBackwardArgs& args) {
  CUSEQ_RUN_SIMD(causal_conv1d_backward, args);
}

}  // namespace cuseq::cpu
