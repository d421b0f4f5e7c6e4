#include "attention/call.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "attention/choice.h"
#include "attention/rows.h"

namespace cuseq::attention {
namespace {

std::vector<Backend>& registered_backends() {
  static auto* all = new std::vector<Backend>();
  return *all;
}

// Return the name under which a profile shows the backend.
std::string profiled_name(const Backend& backend) {
  return std::string("cuseq attention: ") + backend.name;
}

// Run a call with the best of its candidates, or with the next one where that refuses to run it.
template <typename Run>
auto run_with_backend(const Call& call, const Run& run) {
  const Choice choice = choose(call);
  for (const Candidate& candidate : choice.candidates) {
    const Backend& backend = *candidate.backend;
    if (backend.warn != nullptr && call.backend == "auto") backend.warn(call);
    RECORD_USER_SCOPE(profiled_name(backend));
    if (auto result = run(backend)) return *std::move(result);
  }
  TORCH_INTERNAL_ASSERT(false, "every attention backend refused to run the call");
}

bool is_empty(const Call& call) {
  return call.queries.count() == 0 || call.queries.longest == 0 || call.keys.longest == 0;
}

}  // namespace

const std::vector<Backend>& backends() { return registered_backends(); }

RegisterBackend::RegisterBackend(const Backend& backend) {
  auto& all = registered_backends();
  const auto next = std::ranges::find_if(
      all, [&](const Backend& one) { return one.preference < backend.preference; });
  all.insert(next, backend);
}

Output attend(const Call& call) {
  if (!is_empty(call)) {
    return run_with_backend(call, [&](const Backend& backend) { return backend.forward(call); });
  }
  const Tensor& q = call.q;
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor logsumexp = at::full({q.size(1), q.size(0)}, -std::numeric_limits<double>::infinity(),
                              q.options().dtype(lse_type));
  zero_tail({logsumexp.t()}, call.queries);
  return {at::zeros({q.size(0), q.size(1), call.v.size(2)}, q.options()), logsumexp};
}

Gradients attend_backward(const Call& call, const Outer& outer) {
  if (!is_empty(call)) {
    return run_with_backend(call,
                            [&](const Backend& backend) { return backend.backward(call, outer); });
  }
  return {at::zeros(call.q.sizes(), call.q.options()), at::zeros(call.k.sizes(), call.k.options()),
          at::zeros(call.v.sizes(), call.v.options())};
}

}  // namespace cuseq::attention
