#include "attention/call.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "attention/backend.h"

namespace cuseq::attention {
namespace {

// Sorted by descending preference.
std::vector<Backend>& backends() {
  static auto* all = new std::vector<Backend>();
  return *all;
}

const Backend& backend_of(const Call& call) {
  const auto found =
      std::ranges::find_if(backends(), [&](const Backend& one) { return one.takes(call); });
  TORCH_INTERNAL_ASSERT(found != backends().end(), "no attention backend takes the call");
  if (found->warn != nullptr) found->warn(call);
  return *found;
}

bool is_empty(const Call& call) { return call.queries.count() == 0 || call.queries.longest == 0; }

}  // namespace

RegisterBackend::RegisterBackend(const Backend& backend) {
  auto& all = backends();
  const auto next = std::ranges::find_if(
      all, [&](const Backend& one) { return one.preference < backend.preference; });
  all.insert(next, backend);
}

Output attend(const Call& call) {
  if (!is_empty(call)) return backend_of(call).forward(call);
  const Tensor& q = call.q;
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::zeros({q.size(0), q.size(1), call.v.size(2)}, q.options()),
          at::zeros({q.size(1), q.size(0)}, q.options().dtype(lse_type))};
}

Gradients attend_backward(const Call& call, const Outer& outer) {
  if (!is_empty(call)) return backend_of(call).backward(call, outer);
  return {at::zeros(call.q.sizes(), call.q.options()), at::zeros(call.k.sizes(), call.k.options()),
          at::zeros(call.v.sizes(), call.v.options())};
}

}  // namespace cuseq::attention
