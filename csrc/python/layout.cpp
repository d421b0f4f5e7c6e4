#include "cache/host_copies.h"
#include "layout/chunks.h"
#include "layout/host_meta.h"
#include "ops/checks.h"
#include "ops/mask_options.h"
#include "ops/token_metadata.h"
#include "python/bindings.h"

namespace cuseq::python {
namespace {

struct HostMetaSlots {};

// Bind the slots, and the one status that Python sets, as plain ints on a class
// (`_C.HostMeta.NUM_SEQS`), which torch.compile reads as constants.
void bind_host_meta_slots(py::module_& m) {
  py::class_<HostMetaSlots> slots(m, "HostMeta", "What each entry of a layout's host_meta holds.");
  const auto add = [&](const char* name, int slot) { slots.attr(name) = slot; };
  add("NUM_SEQS", kNumSeqs);
  add("MAX_SEQLEN", kMaxSeqlen);
  add("TOTAL_TOKENS", kTotalTokens);
  add("NUM_REAL_TOKENS", kNumRealTokens);
  add("STATUS", kStatus);
  add("LENGTH_DIVISOR", kLengthDivisor);
  add("SIZE", kHostMetaSize);
  add("OF_REPLAYS", kOfReplays);
}

}  // namespace

void bind_layout(py::module_& m) {
  bind_host_meta_slots(m);
  m.def("check_spans_and_rows", &check_spans_and_rows);
  m.def("tokens_of", &tokens_of, Released());
  m.def("start_host_copy", &start_host_copy, Released());
  m.def("copy_to_device", &copy_to_device, Released());
  m.def("wait_host_copy", &wait_host_copy, Released());
  m.def("read_host_meta", &read_host_meta, Released());
  m.def("refill_token_metadata", &refill_token_metadata, Released());
  m.def("recurrent_offsets", &recurrent_offsets, Released());
  m.def("chunks_of", &chunks_of, Released());
}

}  // namespace cuseq::python
