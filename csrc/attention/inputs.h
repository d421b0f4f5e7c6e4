#pragma once

#include "attention/composition.h"
#include "cuseq/attention.h"

// Conversion of the ops' arguments to a checked row.
namespace cuseq::attention {

// Check q, k, v and every option, fill in defaults, and read the layout's numbers if the host knows
// them. May launch a kernel that clamps offsets known only on the device to the row.
CUSEQ_API Row row_of(const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options);

// Check the tensors that the backward gets in addition to the forward's arguments.
Outer outer_of(const Tensor& grad_out, const Tensor& out, const Tensor& logsumexp, const Tensor& q,
               const Tensor& v);

}  // namespace cuseq::attention
