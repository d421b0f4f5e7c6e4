#include "cuseq/ops.h"
#include "python/bindings.h"

namespace cuseq::python {

void bind_layout(py::module_& m) {
  m.def("check_spans_and_rows", &check_spans_and_rows);
  m.def("tokens_of", &tokens_of, Released());
  m.def("start_host_copy", &start_host_copy, Released());
  m.def("copy_to_device", &copy_to_device, Released());
  m.def("wait_host_copy", &wait_host_copy, Released());
  m.def("read_host_meta", &read_host_meta, Released());
}

}  // namespace cuseq::python
