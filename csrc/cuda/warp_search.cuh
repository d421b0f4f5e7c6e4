#pragma once

#include <cstdint>

#include "cuda/launch.cuh"

namespace cuseq::cuda {

// The last of values[0], values[kStep], ... values[last * kStep], which ascend, that is at most
// `bound`, by its number; 0 where none is. The whole warp asks for the same one, and probes 32
// places at a time. Stays inside the array whatever it holds.
template <int kStep>
__device__ __forceinline__ int last_at_most(const int32_t* values, int last, int bound, int lane) {
  int low = 0;
  int high = last;
  while (true) {
    const int step = (high - low) / kWarpSize + 1;
    const int mine = low + lane * step;
    const bool before = mine <= high && values[mine * kStep] <= bound;
    const int count = __popc(__ballot_sync(kFullWarp, before));
    // Values that do not ascend may leave none at most the bound; any place is safe then.
    low += (count > 0 ? count - 1 : 0) * step;
    if (step == 1) return low;
    high = min(low + step - 1, high);
  }
}

// The segment of a token.
__device__ __forceinline__ int segment_of_warp(const SeqLens& seqlens, int token, int lane) {
  return last_at_most<1>(seqlens.cu_seqlens, static_cast<int>(seqlens.n_seqs), token, lane);
}

}  // namespace cuseq::cuda
