#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/masks.h"

namespace cuseq {

// Return the additive mask of a tile [query_begin, query_begin + queries) x [key_begin, key_begin +
// keys): [queries, keys], -inf for hidden keys, with `like`'s dtype and device and aligned for
// SDPA's kernels.
at::Tensor mask_of_tile(const MaskRule& rule, int64_t query_begin, int64_t queries,
                        int64_t key_begin, int64_t keys, const at::Tensor& like);

// Return the size of a mask in bytes. The cache makes room before the mask is allocated.
int64_t dense_mask_bytes(int64_t rows, int64_t row_length, at::ScalarType dtype);
int64_t block_mask_bytes(int64_t rows, int64_t row_length, int64_t query_block, int64_t key_block);

// Raise if the shape, dtype or size of a mask is invalid. Called before the cache makes room for
// it.
void check_dense_mask(int64_t total_tokens, std::optional<int64_t> row_length,
                      at::ScalarType dtype);
void check_block_mask(int64_t total_tokens, std::optional<int64_t> row_length, int64_t query_block,
                      int64_t key_block);

// Check that spans are as kernels read them: int32 [n_spans, 2] on the device of the offsets.
void check_spans(const at::Tensor& spans, const at::Tensor& offsets);

// Raise ValueError for invalid spans, and for rows that a sequence crosses. All tensors must be on
// the host.
CUSEQ_API void check_spans_and_rows(const at::Tensor& cu_seqlens,
                                    const std::optional<at::Tensor>& cu_seqlens_padded,
                                    int64_t total_tokens, const std::optional<at::Tensor>& spans,
                                    std::optional<int64_t> row_length);

}  // namespace cuseq
