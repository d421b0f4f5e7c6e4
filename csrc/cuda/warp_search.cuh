#pragma once

#include <cstdint>

#include "cuda/launch.cuh"

namespace cuseq::cuda {

// Return the greatest i in [0, last] with values[i * kStep] <= bound, or 0 if there is none; values
// must ascend in i. All lanes of the warp must call it with the same arguments: together they probe
// 32 places at a time. It never reads outside the array, whatever the values are.
template <int kStep>
__device__ __forceinline__ int last_at_most(const int32_t* values, int last, int bound, int lane) {
  int low = 0;
  int high = last;
  while (true) {
    const int step = (high - low) / kWarpSize + 1;
    const int mine = low + lane * step;
    const bool before = mine <= high && values[mine * kStep] <= bound;
    const int count = __popc(__ballot_sync(kFullWarp, before));
    // If values do not ascend, none may be at most `bound`; any place in the array is safe then.
    low += (count > 0 ? count - 1 : 0) * step;
    if (step == 1) return low;
    high = min(low + step - 1, high);
  }
}

// Return the segment of a token.
__device__ __forceinline__ int segment_of_warp(const SeqLens& seqlens, int token, int lane) {
  return last_at_most<1>(seqlens.cu_seqlens, static_cast<int>(seqlens.n_seqs), token, lane);
}

}  // namespace cuseq::cuda
