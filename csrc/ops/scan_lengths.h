#pragma once

#include <cstdint>

#include "ops/kernel.h"

namespace cuseq {

// Arguments to compute everything that follows from the running sum of lengths, given lengths or
// offsets. Null outputs are skipped.
struct ScanLengthsArgs {
  const void* source = nullptr;  // [n_seqs], or [n_seqs + 1] if it holds offsets
  int64_t source_stride = 1;     // elements
  bool source_is_int64 = false;
  bool source_is_offsets = false;
  int64_t n_seqs = 0;
  const int32_t* n_seqs_on_device = nullptr;  // actual count; n_seqs is then its upper bound
  int64_t limit = 0;                          // offsets are clamped to it
  int64_t longest = INT64_MAX;                // lengths are clamped to it
  int64_t segment_multiple = 1;               // lengths are rounded up to multiples of it
  int64_t fit_multiple = 1;  // the status says whether lengths rounded up to it fit
  int64_t max_seqs = 0;      // cu_seqlens has max_seqs + 1 entries

  int32_t* lengths = nullptr;             // [n_seqs]
  int32_t* cu_seqlens = nullptr;          // [max_seqs + 1], filled up with the last offset
  int32_t* last_token_indices = nullptr;  // [n_seqs], -1 for an empty sequence
  int32_t* max_seqlen = nullptr;          // [1]
  int32_t* host_meta = nullptr;           // [kHostMetaSize]
};

// Two scans of one source in one launch: of the lengths, and of their padded segments.
struct ScanSegmentsArgs {
  ScanLengthsArgs lengths;
  ScanLengthsArgs segments;
};

namespace cpu {
void scan_lengths(const ScanLengthsArgs& args);
void scan_segments(const ScanSegmentsArgs& args);
}  // namespace cpu

namespace cuda {
void scan_lengths(const ScanLengthsArgs& args, Stream stream);
void scan_segments(const ScanSegmentsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
