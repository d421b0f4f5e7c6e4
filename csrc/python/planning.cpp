#include "planning/planning.h"

#include "python/bindings.h"

namespace cuseq::python {

void bind_planning(py::module_& m) {
  m.def("bin_pack", &bin_pack, Released());
  m.def("permutation", &permutation, Released());
  m.def("pack_window", &pack_window, Released());
  m.def("row_costs", &row_costs, Released());
}

}  // namespace cuseq::python
