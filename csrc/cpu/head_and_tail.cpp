#include "ops/head_and_tail.h"

#include <cstring>

namespace cuseq::cpu {

void zero_tail(const ZeroTailArgs& args) {
  const int64_t first = args.first_row();
  for (int t = 0; t < args.num_tensors; ++t) {
    const RowBytes& rows = args.tensors[t];
    const int64_t stores = rows.stores(args.num_rows - first);
    for (int64_t i = 0; i < stores; ++i) {
      std::memset(rows.store(i, first, args.num_rows), 0, rows.unit);
    }
  }
}

void copy_head(const CopyHeadArgs& args) {
  const int64_t end = args.end_row();
  for (int t = 0; t < args.num_tensors; ++t) {
    const RowBytes& to = args.to[t];
    const int64_t stores = to.stores(end);
    for (int64_t i = 0; i < stores; ++i) {
      std::memcpy(to.store(i, 0, end), args.from[t].store(i, 0, end), to.unit);
    }
  }
}

}  // namespace cuseq::cpu
