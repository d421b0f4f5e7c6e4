#pragma once

#include <utility>

#include "attention/call.h"

// Conversion of rows to the form that PyTorch's kernels need, and back.
namespace cuseq::attention {

// Return whether tokens or heads lie in the same memory, as those of an expanded tensor.
bool is_expanded(const Tensor& rows);

// Return the tensor itself if its rows start at multiples of 16 bytes, as PyTorch's kernels
// require, else a copy.
Tensor aligned_rows(const Tensor& rows);

// Pad the last dimension with zeros to `size`. Return the tensor itself if it has that size.
Tensor pad_last_dim(const Tensor& tensor, int64_t size);

// Return the first `size` entries of the last dimension, contiguous, without a copy if possible.
Tensor unpad_last_dim(const Tensor& tensor, int64_t size);

// Zero the rows after the last sequence, in place, of up to 5 tensors [tokens, heads] or [tokens,
// heads, head_dim]. Kernels leave them uninitialised, and one NaN there would make weight gradients
// NaN.
CUSEQ_API void zero_tail(at::TensorList rows, const Sequences& sequences);

// Copy the rows of the sequences, which must begin at row 0, from the tensors of the second list to
// those of the first: one or two each, [tokens, heads] or [tokens, heads, head_dim]. Only the
// device may know how many rows these are.
CUSEQ_API void copy_head(at::TensorList to, at::TensorList from, const Sequences& sequences);

// Zero the tails of the gradients of q, k and v, in place, and return them.
Gradients with_zero_tails(const Call& call, Gradients gradients);

// Return int32 [tokens] each: the position of every token in its sequence, and the sequence's
// index.
std::pair<Tensor, Tensor> positions_and_seq_ids(const Tensor& offsets, int64_t total_tokens);

// Return bool [tokens]: the queries whose sequence has no keys, in a call of two rows.
Tensor queries_without_keys(const Call& call);

}  // namespace cuseq::attention
