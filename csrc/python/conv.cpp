#include <vector>

#include "cuseq/ops.h"
#include "python/bindings.h"

namespace cuseq::python {
namespace {

// A direct binding, which avoids the boxing of arguments in a call through torch.ops.
std::vector<at::Tensor> causal_conv1d(const at::Tensor& x, const at::Tensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                                      const OptionalTensor& cu_seqlens_padded,
                                      const OptionalTensor& seq_idx,
                                      const OptionalTensor& initial_states, bool silu,
                                      bool final_states) {
  return cuseq::causal_conv1d(
      x, weight, bias,
      {cu_seqlens, cu_seqlens_padded, seq_idx, initial_states, silu, final_states});
}

}  // namespace

void bind_conv(py::module_& m) { m.def("causal_conv1d", &causal_conv1d, Released()); }

}  // namespace cuseq::python
