#include <ATen/Parallel.h>

#include <algorithm>

#include "cuseq/seqlens.h"
#include "ops/token_metadata.h"

namespace cuseq::cpu {

void token_metadata(const TokenMetadataArgs& args) {
  const SeqLens& seqlens = args.segments.seqlens;
  constexpr int64_t kGrain = 1 << 14;
  at::parallel_for(0, args.segments.total_tokens, kGrain, [&](int64_t first, int64_t last) {
    int64_t token = first;
    while (token < last) {
      const int64_t segment = seqlens.segment_of(token);
      const int64_t begin = seqlens.begin(segment);
      const int64_t end =
          segment < seqlens.n_seqs ? std::min<int64_t>(seqlens.begin(segment + 1), last) : last;
      // Advance by at least one token, so that the loop ends even if offsets do not ascend.
      const int64_t stop = std::max(end, token + 1);
      for (; token < stop; ++token) {
        if (args.position_ids != nullptr) {
          args.position_ids[token] = static_cast<int32_t>(token - begin);
        }
        if (args.seq_ids != nullptr) args.seq_ids[token] = static_cast<int32_t>(segment);
        if (args.is_pad != nullptr) args.is_pad[token] = !args.segments.is_real(token, segment);
      }
    }
  });
}

}  // namespace cuseq::cpu
