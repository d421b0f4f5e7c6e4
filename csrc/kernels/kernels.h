#pragma once

#include <cstddef>
#include <cstdint>

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
  int64_t max_seqs = 0;                       // cu_seqlens has max_seqs + 1 entries

  int32_t* lengths = nullptr;             // [n_seqs]
  int32_t* cu_seqlens = nullptr;          // [max_seqs + 1], last offset repeated
  int32_t* last_token_indices = nullptr;  // [n_seqs], -1 where a sequence is empty
  int32_t* max_seqlen = nullptr;          // [1]
  int32_t* host_meta = nullptr;           // [kHostMetaSize]
};

struct TokenMetadataArgs {
  const int32_t* cu_seqlens = nullptr;  // [n_seqs + 1]
  int64_t n_seqs = 0;
  int64_t total_tokens = 0;
  int32_t* position_ids = nullptr;  // [total_tokens] or null
  int32_t* seq_ids = nullptr;       // [total_tokens] or null
};

struct PaddingMaskArgs {
  const void* mask = nullptr;  // [rows, cols], real where any byte is set
  int64_t element_size = 1;    // bytes: 1, 2, 4 or 8
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 1;
  int32_t* lengths = nullptr;  // [rows]
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
  int64_t total_tokens = 0;
  const int32_t* cu_seqlens = nullptr;  // [n_seqs + 1]
  int64_t n_seqs = 0;
  bool shifted = false;
  int64_t ignore_index = -100;
};

namespace cpu {
void scan_lengths(const ScanLengthsArgs& args);
void token_metadata(const TokenMetadataArgs& args);
void lengths_from_padding_mask(const PaddingMaskArgs& args);
void cu_seqlens_from_position_ids(const PositionIdsArgs& args);
void mask_boundary_labels(const BoundaryLabelsArgs& args);
}  // namespace cpu

namespace cuda {
void scan_lengths(const ScanLengthsArgs& args, Stream stream);
void token_metadata(const TokenMetadataArgs& args, Stream stream);
void lengths_from_padding_mask(const PaddingMaskArgs& args, Stream stream);
void cu_seqlens_from_position_ids(const PositionIdsArgs& args, Stream stream);
void mask_boundary_labels(const BoundaryLabelsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
