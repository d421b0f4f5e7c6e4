#pragma once

#include <cstddef>
#include <cstdint>

#include "cuseq/macros.h"
#include "cuseq/seqlens.h"

// What the kernels see: pointers and small structs, no torch. Each kernel has one CPU and one CUDA
// form of the same name, in csrc/cpu/NAME.cpp and csrc/cuda/NAME.cu. Every form stays inside the
// tensors described here whatever values they hold.

struct CUstream_st;

namespace cuseq {

using Stream = CUstream_st*;

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

// Between a row whose segments have padding and the same sequences without it.
struct SegmentRowsArgs {
  Segments segments;
  int32_t* places = nullptr;  // [total_tokens], where each real token lies; -1 behind the last
  int32_t* ranks = nullptr;   // [total_tokens], which of the real tokens each is; -1 on padding
};

struct CpRowsArgs {
  ContextParallel deal;
  int32_t* tokens = nullptr;  // [total_tokens], of each place of the dealt row
  int32_t* places = nullptr;  // [total_tokens], of each token
};

struct TokenMetadataArgs {
  Segments segments{};
  // [total_tokens] each, or null
  int32_t* position_ids = nullptr;
  int32_t* seq_ids = nullptr;
  bool* is_pad = nullptr;
};

// Which elements of a mask stand for real tokens.
enum class MaskKind : uint8_t {
  kNonZeroIsReal,
  kZeroIsReal,
  kNegativeIsHidden,  // additive, floating point
};

// Of an element, as an unsigned number of its bits.
template <typename T>
CUSEQ_HOST_DEVICE bool is_real_token(T bits, MaskKind kind) {
  if (kind == MaskKind::kNonZeroIsReal) return bits != 0;
  if (kind == MaskKind::kZeroIsReal) return bits == 0;
  constexpr T kMinusZero = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  return bits <= kMinusZero;
}

struct PaddingMaskArgs {
  const void* mask = nullptr;  // [rows, cols]
  MaskKind kind = MaskKind::kNonZeroIsReal;
  int64_t element_size = 1;  // bytes: 1, 2, 4 or 8
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 1;
  int32_t* lengths = nullptr;  // [rows]
};

// Where each slot of a padded batch lies in the packed row, the other way round, and what there is
// to say about each token on the way.
struct MaskRowsArgs {
  PaddingMaskArgs mask;                 // its lengths are not written
  const int32_t* cu_seqlens = nullptr;  // [rows + 1], of the segments
  int64_t total_tokens = 0;
  int32_t* slots = nullptr;   // [total_tokens], row * cols + col of each token, -1 on pads and tail
  int32_t* tokens = nullptr;  // [rows, cols], token of each slot, -1 where there is none
  int32_t* position_ids = nullptr;  // [total_tokens], in the segment; the tail restarts
  int32_t* seq_ids = nullptr;       // [total_tokens], rows on the tail
  bool* is_pad = nullptr;           // [total_tokens]
};

struct PositionIdsArgs {
  const void* position_ids = nullptr;  // [rows, cols]
  bool is_int64 = true;
  bool is_plane = false;  // one plane of multimodal positions
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 1;
  int64_t max_seqs = 0;
  int64_t tile_size = 0;           // tokens of one tile, CUDA only
  int32_t* tile_counts = nullptr;  // [number of tiles], scratch, CUDA only
  int32_t* cu_seqlens = nullptr;   // [max_seqs + 1], last offset repeated
  int32_t* num_seqs = nullptr;     // [1], the true count, above max_seqs too
};

struct BoundaryLabelsArgs {
  const void* labels = nullptr;  // [total_tokens]
  void* out = nullptr;           // [total_tokens]
  bool is_int64 = true;
  Segments segments;
  int64_t shift = 0;  // tokens that the labels were shifted left by
  int64_t ignore_index = -100;
};

namespace cpu {
void scan_lengths(const ScanLengthsArgs& args);
void scan_segments(const ScanSegmentsArgs& args);
void token_metadata(const TokenMetadataArgs& args);
void lengths_from_padding_mask(const PaddingMaskArgs& args);
void mask_rows(const MaskRowsArgs& args);
void segment_rows(const SegmentRowsArgs& args);
void cp_rows(const CpRowsArgs& args);
void cu_seqlens_from_position_ids(const PositionIdsArgs& args);
void mask_boundary_labels(const BoundaryLabelsArgs& args);
}  // namespace cpu

namespace cuda {
void scan_lengths(const ScanLengthsArgs& args, Stream stream);
void scan_segments(const ScanSegmentsArgs& args, Stream stream);
void token_metadata(const TokenMetadataArgs& args, Stream stream);
void lengths_from_padding_mask(const PaddingMaskArgs& args, Stream stream);
void mask_rows(const MaskRowsArgs& args, Stream stream);
void segment_rows(const SegmentRowsArgs& args, Stream stream);
void cp_rows(const CpRowsArgs& args, Stream stream);
void cu_seqlens_from_position_ids(const PositionIdsArgs& args, Stream stream);
void mask_boundary_labels(const BoundaryLabelsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
