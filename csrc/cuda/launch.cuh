#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuseq/seqlens.h"

namespace cuseq::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Return the number of multiprocessors of the current device.
inline int multiprocessors() {
  int device = 0;
  int count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// The range of segments that holds a block's tokens. Two searches over all offsets, for the block's
// first and last token, serve the whole block; each thread then searches the few in between.
struct BlockSegments {
  int64_t low;
  int64_t high;

  __device__ static BlockSegments of(const SeqLens& seqlens, int64_t first_token,
                                     int64_t last_token) {
    __shared__ BlockSegments found;
    if (threadIdx.x == 0) {
      found.low = seqlens.segment_of(first_token);
    } else if (threadIdx.x == 32) {
      found.high = seqlens.segment_of(last_token);
    }
    __syncthreads();
    // Offsets that do not ascend could make the range empty; any range inside the array is safe.
    return {found.low, found.high < found.low ? found.low : found.high};
  }
};

}  // namespace cuseq::cuda
