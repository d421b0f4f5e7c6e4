#include "ops/delta_rule.h"

#include <vector>

#include "python/bindings.h"

namespace cuseq::python {
namespace {

using at::Tensor;
using Counts = std::vector<int64_t>;

Tensor states(const Tensor& values, const Tensor& reads, const Tensor& writes, const Tensor& decay,
              const Counts& counts, int64_t heads) {
  return delta_rule_states({reads, writes, decay, counts, heads}, values);
}

void gradients(const Tensor& states_grad, const Tensor& values_grad, const Tensor& writes_grad,
               const Tensor& decayed_grad, const Tensor& states, const Tensor& values,
               const Tensor& reads, const Tensor& writes, const Tensor& decay, const Counts& counts,
               int64_t heads) {
  delta_rule_gradients({reads, writes, decay, counts, heads}, states, values,
                       {states_grad, values_grad, writes_grad, decayed_grad});
}

}  // namespace

void bind_delta_rule(py::module_& m) {
  m.def("delta_rule_states", &states, Released());
  m.def("delta_rule_gradients", &gradients, Released());
}

}  // namespace cuseq::python
