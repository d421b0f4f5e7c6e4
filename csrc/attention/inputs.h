#pragma once

#include "attention/composition.h"
#include "cuseq/attention.h"

// From the arguments of the ops to a checked row.
namespace cuseq::attention {

// Checks q, k, v and every option, fills in defaults, and reads the layout's numbers where the host
// knows them. May launch a kernel: offsets that only the device knows are brought inside the row.
Row row_of(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options);

// Checks what the backward is given beside the forward's arguments.
Outer outer_of(const Tensor& grad_out, const Tensor& out, const Tensor& logsumexp, const Tensor& q,
               const Tensor& v);

}  // namespace cuseq::attention
