#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cuseq/macros.h"

// The C++ interface of torch.ops.cuseq, for programs that load libcuseq without Python. Shapes,
// dtypes and errors are those of the Python functions of the same names.
namespace cuseq {

CUSEQ_API at::Tensor cu_seqlens(const at::Tensor& lengths);
CUSEQ_API at::Tensor max_seqlen(const at::Tensor& lengths);
CUSEQ_API at::Tensor last_token_indices(const at::Tensor& lengths);
CUSEQ_API at::Tensor position_ids(const at::Tensor& lengths, int64_t total_tokens);
CUSEQ_API at::Tensor seq_ids(const at::Tensor& lengths, int64_t total_tokens);

// The same ops through the identity cache.
CUSEQ_API at::Tensor cached_cu_seqlens(const at::Tensor& lengths);
CUSEQ_API at::Tensor cached_position_ids(const at::Tensor& lengths, int64_t total_tokens);
CUSEQ_API at::Tensor cached_seq_ids(const at::Tensor& lengths, int64_t total_tokens);

// Gather rows of several tensors by one index, in one launch (csrc/ops/gather_rows.cpp).
CUSEQ_API std::vector<at::Tensor> gather_rows(at::TensorList tensors, const at::Tensor& index,
                                              const at::Tensor& inverse, at::IntArrayRef rows,
                                              int64_t leading, at::ArrayRef<at::Scalar> fill);

// Return two int32 [total_tokens] tensors for a row with padded segments: the place of each real
// token, and the rank of each token among the real ones. Entries without a value are -1.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> segment_rows(const at::Tensor& cu_seqlens,
                                                          const at::Tensor& cu_seqlens_padded,
                                                          int64_t total_tokens);

// The options of a convolution: all its arguments but x, weight and bias.
struct ConvOptions {
  std::optional<at::Tensor> cu_seqlens;         // int32 [n_seqs + 1]
  std::optional<at::Tensor> cu_seqlens_padded;  // segment starts, if segments are padded
  std::optional<at::Tensor> seq_idx;            // int32 [batch, tokens], instead of offsets
  std::optional<at::Tensor> initial_states;     // [n_seqs or batch, channels, width - 1]
  bool silu = false;
  bool final_states = false;  // whether to return the states after the last tokens
};

// Convolve [tokens, channels] or [batch, tokens, channels] with weight [channels, width] and bias
// [channels]. Return the output and, if asked for, the final states.
CUSEQ_API std::vector<at::Tensor> causal_conv1d(const at::Tensor& x, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias,
                                                const ConvOptions& options);

// The rule that says which keys each token of a row may attend to.
struct MaskOptions {
  at::Tensor source;  // lengths, or their offsets
  c10::SymInt total_tokens;
  bool from_cu_seqlens = false;
  bool causal = true;
  std::optional<int64_t> window;
  std::optional<at::Tensor> spans;              // int32 [n_spans, 2]
  std::optional<at::Tensor> cu_seqlens_padded;  // segment starts, if segments are padded
};

// Return the keys [first, end) of each token, int32 [2, total_tokens].
CUSEQ_API at::Tensor mask_ranges(const MaskOptions& options);
// Return a mask [rows, 1, row_length, row_length]: bool without a dtype, else additive.
CUSEQ_API at::Tensor dense_mask(const MaskOptions& options,
                                const std::optional<c10::SymInt>& row_length = std::nullopt,
                                std::optional<at::ScalarType> dtype = std::nullopt,
                                bool finite = false);
// Return the tensors of a FlexAttention BlockMask, in the order of its arguments.
CUSEQ_API std::vector<at::Tensor> block_mask(
    const at::Tensor& ranges, const std::optional<c10::SymInt>& row_length = std::nullopt,
    int64_t query_block = 128, int64_t key_block = 128);

// Masks through the identity cache. Lengths and offsets are separate keys, so a mask made from
// lengths is not found from their offsets.
CUSEQ_API at::Tensor cached_mask_ranges(const MaskOptions& options);
CUSEQ_API at::Tensor cached_dense_mask(const MaskOptions& options,
                                       const std::optional<c10::SymInt>& row_length = std::nullopt,
                                       std::optional<at::ScalarType> dtype = std::nullopt,
                                       bool finite = false);
CUSEQ_API std::vector<at::Tensor> cached_block_mask(
    const MaskOptions& options, const std::optional<c10::SymInt>& row_length = std::nullopt,
    int64_t query_block = 128, int64_t key_block = 128);

}  // namespace cuseq
