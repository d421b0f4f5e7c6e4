#include "attention/flash_rows.h"

#include <algorithm>

#include "attention/backend.h"
#include "attention/rows.h"
#include "cuseq/seqlens.h"
#include "ops/dtype_name.h"

namespace cuseq::attention {

int64_t flash_head_dim(const Call& call) {
  constexpr int64_t kMultiple = 8;
  return round_up(std::max(call.q.size(2), call.v.size(2)), kMultiple);
}

Tensor flash_rows(const Tensor& rows, int64_t head_dim) {
  return aligned_rows(pad_last_dim(rows, head_dim));
}

FlashWindow::FlashWindow(const Call& call) {
  if (!call.window.has_value()) return;
  left = *call.window - 1;
  right = call.causal ? 0 : *left;
}

bool flash_takes(const Call& call, std::string* why) {
  const auto dtype = call.q.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    return refuse(why, "it takes fp16 and bf16, got ", dtype_name(dtype));
  }
  if (flash_head_dim(call) > kMaxFlashHeadDim) {
    return refuse(why, "it takes head_dim up to ", kMaxFlashHeadDim, ", got ",
                  std::max(call.q.size(2), call.v.size(2)));
  }
  if (const char* extra = call.extra()) return refuse(why, "it has no ", extra);
  return true;
}

}  // namespace cuseq::attention
