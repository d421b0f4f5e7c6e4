#include <ATen/Parallel.h>

#include "ops/cp_rows.h"

namespace cuseq::cpu {

void cp_rows(const CpRowsArgs& args) {
  constexpr int64_t kGrain = 1 << 13;
  const int64_t own = args.deal.total_tokens / args.deal.cp_size;
  at::parallel_for(0, args.deal.total_tokens, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      args.tokens[i] = static_cast<int32_t>(args.deal.token_of(i % own, i / own));
      args.places[i] = static_cast<int32_t>(args.deal.dealt(i));
    }
  });
}

}  // namespace cuseq::cpu
