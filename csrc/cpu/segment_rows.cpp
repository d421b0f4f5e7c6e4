#include <ATen/Parallel.h>

#include "ops/segment_rows.h"

namespace cuseq::cpu {

void segment_rows(const SegmentRowsArgs& args) {
  constexpr int64_t kGrain = 1 << 13;
  at::parallel_for(0, args.segments.total_tokens, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      args.places[token] = static_cast<int32_t>(args.segments.place_of(token));
      args.ranks[token] = static_cast<int32_t>(args.segments.rank_of(token));
    }
  });
}

}  // namespace cuseq::cpu
