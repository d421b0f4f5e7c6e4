#pragma once

#include <cstdint>

#include "ops/kernel.h"

namespace cuseq {

// Lengths, or offsets, in: everything that follows from their running sum out. Null outputs are
// skipped.
struct ScanLengthsArgs {
  const void* source = nullptr;  // [n_seqs], or [n_seqs + 1] when it holds offsets
  int64_t source_stride = 1;     // elements
  bool source_is_int64 = false;
  bool source_is_offsets = false;
  int64_t n_seqs = 0;
  const int32_t* n_seqs_on_device = nullptr;  // overrides n_seqs, which then bounds it
  int64_t limit = 0;                          // offsets stop here
  int64_t longest = INT64_MAX;                // lengths stop here
  int64_t segment_multiple = 1;               // lengths are rounded up to multiples of it
  int64_t fit_multiple = 1;                   // and to this one they have to fit, says the status
  int64_t max_seqs = 0;                       // cu_seqlens has max_seqs + 1 entries

  int32_t* lengths = nullptr;             // [n_seqs]
  int32_t* cu_seqlens = nullptr;          // [max_seqs + 1], last offset repeated
  int32_t* last_token_indices = nullptr;  // [n_seqs], -1 where a sequence is empty
  int32_t* max_seqlen = nullptr;          // [1]
  int32_t* host_meta = nullptr;           // [kHostMetaSize]
};

// Two scans of one source in one launch: of the lengths, and of the segments that they are padded
// to.
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
