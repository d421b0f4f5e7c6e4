#include "ops/zero_tail.h"

#include <cstring>

namespace cuseq::cpu {

void zero_tail(const ZeroTailArgs& args) {
  const int64_t first = args.first_row();
  for (int t = 0; t < args.num_tensors; ++t) {
    const RowBytes& rows = args.tensors[t];
    const int64_t stores = (args.num_rows - first) * rows.parts * (rows.bytes / rows.unit);
    for (int64_t i = 0; i < stores; ++i) {
      std::memset(rows.store(i, first, args.num_rows), 0, rows.unit);
    }
  }
}

}  // namespace cuseq::cpu
