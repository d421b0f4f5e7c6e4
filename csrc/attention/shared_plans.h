#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "attention/call.h"
#include "cuseq/macros.h"

// cuDNN makes a plan for a number of sequences, a longest length and a number of tokens, which
// takes 0.1 s, and executes it on rows with fewer and shorter sequences too. So rows share plans:
// these numbers are rounded up to few values.
namespace cuseq::attention {

struct PlanSizes {
  int64_t sequences = 0;
  int64_t longest = 0;
  int64_t tokens = 0;
};

// Return the sizes of the plan for a row's sequences. One more significant binary digit of a size
// halves what rounding it costs and doubles its values; these keep the plans of a training run to
// some tens (docs/attention.md has the figures).
CUSEQ_API PlanSizes plan_sizes(int64_t sequences, int64_t longest, int64_t tokens);

// Return the microseconds that a backward takes beyond those of the rows in the table of
// measurements: it clears gradients in fp32 for each of the plan's sequences at full length.
double extra_us_of_plan(const Call& call);

// Return why cuDNN's attention cannot be used on GPUs of a compute capability such as 90; empty if
// it can.
CUSEQ_API std::string why_no_cudnn(int64_t sm);

// The sizes, heads, strides and options by which torch looks a plan up.
using PlanKey = std::array<int64_t, 24>;

// Count a plan unless this thread has used it before: torch keeps plans of a thread.
void count_plan(const PlanKey& key);

// Return the number of plans that all threads have made.
CUSEQ_API int64_t plans_made();

}  // namespace cuseq::attention
