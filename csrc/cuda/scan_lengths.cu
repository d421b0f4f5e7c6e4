#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/launch.cuh"
#include "layout/host_meta.h"
#include "ops/scan_lengths.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kItems = 8;

struct Max {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};

struct CommonDivisor {
  __device__ int64_t operator()(int64_t a, int64_t b) const {
    return greatest_common_divisor(a, b);
  }
};

// One block walks all lengths, 8,192 at a time. A packed row holds hundreds of sequences, so a
// second launch would cost more than the walk; 100,000 sequences still take only 13 rounds.
template <typename T>
__device__ __forceinline__ void scan(const ScanLengthsArgs& args) {
  using Scan = cub::BlockScan<int64_t, kThreads>;
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  } shared;

  const T* source = static_cast<const T*>(args.source);
  const int64_t stride = args.source_stride;
  const int64_t limit = args.limit;
  int64_t n = args.n_seqs;
  int32_t status = kLayoutOk;
  if (args.n_seqs_on_device != nullptr) {
    const int64_t count = *args.n_seqs_on_device;
    if (count > n) status |= kTooManySequences;
    n = count < 0 ? 0 : (count > n ? n : count);
  }
  if (args.source_is_offsets && source[0] != 0) status |= kFirstOffsetNotZero;
  if (args.cu_seqlens != nullptr && threadIdx.x == 0) args.cu_seqlens[0] = 0;

  int64_t total = 0;
  int64_t padded = 0;  // of this thread's lengths
  int64_t longest = 0;
  int64_t divisor = 0;
  for (int64_t base = 0; base < n; base += kThreads * kItems) {
    const int64_t first = base + threadIdx.x * kItems;
    int64_t length[kItems];
    int64_t sum = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t i = first + k;
      int64_t raw = 0;
      if (i < n) {
        raw = args.source_is_offsets
                  ? static_cast<int64_t>(source[(i + 1) * stride]) - source[i * stride]
                  : static_cast<int64_t>(source[i * stride]);
      }
      if (raw < 0) status |= kNegativeLength;
      const int64_t bounded = min(bounded_length(raw, limit), args.longest);
      length[k] = segment_length(bounded, args.segment_multiple);
      padded += segment_length(length[k], args.fit_multiple);
      longest = Max()(longest, length[k]);
      if (args.host_meta != nullptr) divisor = greatest_common_divisor(length[k], divisor);
      sum += length[k];
    }
    int64_t before;
    int64_t round_total;
    Scan(shared.scan).ExclusiveSum(sum, before, round_total);
    __syncthreads();  // the next round, or the reduction, reuses the storage
    int64_t end = total + before;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t i = first + k;
      end += length[k];
      if (i >= n) continue;
      if (args.lengths != nullptr) args.lengths[i] = bounded_offset(length[k], limit);
      if (args.cu_seqlens != nullptr && i < args.max_seqs) {
        args.cu_seqlens[i + 1] = bounded_offset(end, limit);
      }
      if (args.last_token_indices != nullptr) {
        args.last_token_indices[i] = length[k] > 0 ? bounded_offset(end, limit) - 1 : -1;
      }
    }
    total += round_total;
  }
  if (total > limit) status |= kSumAboveTotal;
  if (n > args.max_seqs) status |= kTooManySequences;

  const int32_t last = bounded_offset(total, limit);
  if (args.cu_seqlens != nullptr) {
    for (int64_t i = n + 1 + threadIdx.x; i <= args.max_seqs; i += kThreads) {
      args.cu_seqlens[i] = last;
    }
  }
  if (args.lengths != nullptr) {
    for (int64_t i = n + threadIdx.x; i < args.n_seqs; i += kThreads) args.lengths[i] = 0;
  }
  if (args.max_seqlen == nullptr && args.host_meta == nullptr) return;

  if (args.fit_multiple > 1) {
    if (Reduce(shared.reduce).Sum(padded) > limit) status |= kSumAboveTotal;  // valid in thread 0
    __syncthreads();
  }
  const int any_negative = __syncthreads_or(status & kNegativeLength);
  const int64_t block_longest = Reduce(shared.reduce).Reduce(longest, Max());
  __syncthreads();
  const int64_t block_divisor = Reduce(shared.reduce).Reduce(divisor, CommonDivisor());
  if (threadIdx.x != 0) return;
  const int32_t max_seqlen = bounded_offset(block_longest, limit);
  if (args.max_seqlen != nullptr) *args.max_seqlen = max_seqlen;
  if (args.host_meta != nullptr) {
    args.host_meta[kNumSeqs] = static_cast<int32_t>(n < args.max_seqs ? n : args.max_seqs);
    args.host_meta[kMaxSeqlen] = max_seqlen;
    args.host_meta[kTotalTokens] = static_cast<int32_t>(limit);
    args.host_meta[kNumRealTokens] = last;
    args.host_meta[kStatus] = status | (any_negative ? kNegativeLength : kLayoutOk);
    args.host_meta[kLengthDivisor] = bounded_offset(block_divisor, limit);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scan_lengths_kernel(const __grid_constant__ ScanLengthsArgs args) {
  scan<T>(args);
}

// One block scans the lengths, another the segments.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    scan_segments_kernel(const __grid_constant__ ScanSegmentsArgs args) {
  scan<T>(blockIdx.x == 0 ? args.lengths : args.segments);
}

}  // namespace

void scan_segments(const ScanSegmentsArgs& args, Stream stream) {
  if (args.lengths.source_is_int64) {
    scan_segments_kernel<int64_t><<<2, kThreads, 0, stream>>>(args);
  } else {
    scan_segments_kernel<int32_t><<<2, kThreads, 0, stream>>>(args);
  }
}

void scan_lengths(const ScanLengthsArgs& args, Stream stream) {
  if (args.source_is_int64) {
    scan_lengths_kernel<int64_t><<<1, kThreads, 0, stream>>>(args);
  } else {
    scan_lengths_kernel<int32_t><<<1, kThreads, 0, stream>>>(args);
  }
}

}  // namespace cuseq::cuda
