#include <algorithm>

#include "cuseq/seqlens.h"
#include "layout/host_meta.h"
#include "ops/scan_lengths.h"

namespace cuseq::cpu {
namespace {

template <typename T>
void scan(const ScanLengthsArgs& args) {
  const T* source = static_cast<const T*>(args.source);
  const int64_t stride = args.source_stride;
  int64_t n = args.n_seqs;
  int32_t status = kLayoutOk;
  if (args.n_seqs_on_device != nullptr) {
    n = std::clamp<int64_t>(*args.n_seqs_on_device, 0, args.n_seqs);
    if (*args.n_seqs_on_device > args.n_seqs) status |= kTooManySequences;
  }
  if (args.source_is_offsets && source[0] != 0) status |= kFirstOffsetNotZero;

  int64_t sum = 0;
  int64_t padded = 0;
  int64_t longest = 0;
  int64_t divisor = 0;
  if (args.cu_seqlens != nullptr) args.cu_seqlens[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t raw = args.source_is_offsets
                            ? static_cast<int64_t>(source[(i + 1) * stride]) - source[i * stride]
                            : static_cast<int64_t>(source[i * stride]);
    if (raw < 0) status |= kNegativeLength;
    const int64_t bounded = std::min(bounded_length(raw, args.limit), args.longest);
    const int64_t length = segment_length(bounded, args.segment_multiple);
    sum += length;
    padded += segment_length(length, args.fit_multiple);
    longest = std::max(longest, length);
    divisor = greatest_common_divisor(length, divisor);
    const int32_t end = bounded_offset(sum, args.limit);
    if (args.lengths != nullptr) args.lengths[i] = bounded_offset(length, args.limit);
    if (args.cu_seqlens != nullptr && i < args.max_seqs) args.cu_seqlens[i + 1] = end;
    if (args.last_token_indices != nullptr) args.last_token_indices[i] = length > 0 ? end - 1 : -1;
  }
  if (std::max(sum, padded) > args.limit) status |= kSumAboveTotal;
  if (n > args.max_seqs) status |= kTooManySequences;

  const int32_t last = bounded_offset(sum, args.limit);
  if (args.cu_seqlens != nullptr && n < args.max_seqs) {
    std::fill(args.cu_seqlens + n + 1, args.cu_seqlens + args.max_seqs + 1, last);
  }
  if (args.lengths != nullptr) std::fill(args.lengths + n, args.lengths + args.n_seqs, 0);
  const int32_t max_seqlen = bounded_offset(longest, args.limit);
  if (args.max_seqlen != nullptr) *args.max_seqlen = max_seqlen;
  if (args.host_meta != nullptr) {
    args.host_meta[kNumSeqs] = static_cast<int32_t>(std::min(n, args.max_seqs));
    args.host_meta[kMaxSeqlen] = max_seqlen;
    args.host_meta[kTotalTokens] = static_cast<int32_t>(args.limit);
    args.host_meta[kNumRealTokens] = last;
    args.host_meta[kStatus] = status;
    args.host_meta[kLengthDivisor] = bounded_offset(divisor, args.limit);
  }
}

}  // namespace

void scan_lengths(const ScanLengthsArgs& args) {
  args.source_is_int64 ? scan<int64_t>(args) : scan<int32_t>(args);
}

void scan_segments(const ScanSegmentsArgs& args) {
  scan_lengths(args.lengths);
  scan_lengths(args.segments);
}

}  // namespace cuseq::cpu
