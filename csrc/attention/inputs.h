#pragma once

#include <array>
#include <cstdint>

#include "attention/composition.h"
#include "cuseq/attention.h"

// Conversion of the ops' arguments to a checked row.
namespace cuseq::attention {

// Check q, k, v and every option, fill in defaults, and read the layout's numbers if the host knows
// them. May launch a kernel that clamps offsets known only on the device to the row.
CUSEQ_API Row row_of(const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options);

// Return the sizes of the rows that a rank's part can keep from its forward to its backward.
std::array<int64_t, 2> far_rows_sizes(const Call& call);

// Check the far rows that the backward gets: those of the forward for a rank's part, else none.
void check_far_rows(const OptionalTensor& far_rows, const Row& row);

// Check the tensors that the backward gets in addition to the forward's arguments.
Outer outer_of(const Tensor& grad_out, const Tensor& out, const Tensor& logsumexp, const Tensor& q,
               const Tensor& v);

}  // namespace cuseq::attention
