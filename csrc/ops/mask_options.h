#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/masks.h"

namespace cuseq {

// The tokens [query_begin, query_begin + queries) against the keys of a like range: additive, -inf
// where a key is hidden, [queries, keys] of `like`'s dtype and device, aligned for SDPA's kernels.
at::Tensor mask_of_tile(const MaskRule& rule, int64_t query_begin, int64_t queries,
                        int64_t key_begin, int64_t keys, const at::Tensor& like);

// Memory of masks, for the cache, which makes room before it is allocated.
int64_t dense_mask_bytes(int64_t rows, int64_t row_length, at::ScalarType dtype);
int64_t block_mask_bytes(int64_t rows, int64_t row_length, int64_t query_block, int64_t key_block);

// Raise what is wrong with the shape of a mask, before anything makes room for it.
void check_dense_mask(int64_t total_tokens, std::optional<int64_t> row_length,
                      at::ScalarType dtype);
void check_block_mask(int64_t total_tokens, std::optional<int64_t> row_length, int64_t query_block,
                      int64_t key_block);

// Spans in the form that kernels read, int32 [n_spans, 2] beside the offsets.
void check_spans(const at::Tensor& spans, const at::Tensor& offsets);

// Raises what is wrong with spans, and with rows that a sequence crosses. All tensors on the host.
CUSEQ_API void check_spans_and_rows(const at::Tensor& cu_seqlens,
                                    const std::optional<at::Tensor>& cu_seqlens_padded,
                                    int64_t total_tokens, const std::optional<at::Tensor>& spans,
                                    std::optional<int64_t> row_length);

}  // namespace cuseq
