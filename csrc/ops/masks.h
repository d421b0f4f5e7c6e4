#pragma once

#include <cstdint>

#include "cuseq/masks.h"
#include "ops/kernel.h"

// Arguments of the mask kernels.
namespace cuseq {

struct MaskRangesArgs {
  MaskRule rule;
  int64_t total_tokens = 0;
  int32_t* first = nullptr;  // [total_tokens]
  int32_t* end = nullptr;    // [total_tokens]
};

// `rows` masks of `queries` x `keys`. Mask 0 starts at the tokens query_begin and key_begin; each
// further one starts row_step tokens later.
struct DenseMaskArgs {
  MaskRule rule;
  int64_t rows = 1;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t query_begin = 0;
  int64_t key_begin = 0;
  int64_t row_step = 0;
  void* out = nullptr;  // [rows, queries, stride], fully written
  int64_t stride = 0;   // elements, a multiple of 16 bytes
  int64_t element_size = 1;
  uint64_t seen = 0;  // bits of the element of a visible key
  uint64_t hidden = 0;
};

// A flat row, divided into rows of `row_length` tokens.
struct BlockMaskArgs {
  const int32_t* first = nullptr;  // [rows * row_length]
  const int32_t* end = nullptr;
  int64_t rows = 0;
  int64_t row_length = 0;
  int64_t query_block = 128;
  int64_t key_block = 128;
  int64_t query_blocks = 0;
  int64_t key_blocks = 0;
  int32_t* ranges = nullptr;       // [rows, query_blocks, 4], scratch, CUDA only
  int32_t* key_counts[2] = {};     // [rows, query_blocks]: blocks seen partly, and completely
  int32_t* key_indices[2] = {};    // [rows, query_blocks, key_blocks], 0 after the count
  int32_t* query_counts[2] = {};   // [rows, key_blocks]
  int32_t* query_indices[2] = {};  // [rows, key_blocks, query_blocks], 0 after the count
};

namespace cpu {
void mask_ranges(const MaskRangesArgs& args);
void dense_mask(const DenseMaskArgs& args);
void block_mask(const BlockMaskArgs& args);
}  // namespace cpu

namespace cuda {
void mask_ranges(const MaskRangesArgs& args, Stream stream);
void dense_mask(const DenseMaskArgs& args, Stream stream);
void block_mask(const BlockMaskArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
