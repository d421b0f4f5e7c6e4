#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include "ops/checks.h"
#include "python/bindings.h"

// The functions that cannot be ops: the cache with its cheap hits, waits for host copies, planning
// on the host, and rotations and convolutions with unboxed arguments.
namespace {

namespace py = pybind11;

py::dict build_info() {
  py::dict info;
#ifdef CUSEQ_WITH_CUDA
  info["cuda"] = true;
  info["cuda_archs"] = CUSEQ_CUDA_ARCHS;
#else
  info["cuda"] = false;
  info["cuda_archs"] = "";
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  // Raise the same exceptions as torch's own bindings: ValueError and TypeError, without a C++
  // stack.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (python_error& raised) {  // raised in Python, by a hook or a dispatch mode
      raised.restore();
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(std::current_exception());
    }
  });

  try {
    cuseq::device_checks_enabled();
  } catch (const c10::Error&) {  // an invalid environment variable: the import raises this error
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
  m.def("build_info", &build_info);
  cuseq::python::bind_attention(m);
  cuseq::python::bind_cache(m);
  cuseq::python::bind_conv(m);
  cuseq::python::bind_layout(m);
  cuseq::python::bind_parameters(m);
  cuseq::python::bind_planning(m);
  cuseq::python::bind_rope(m);
  cuseq::python::bind_trees(m);
}
