#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cuseq/macros.h"

// The C++ side of torch.ops.cuseq, for programs that load libcuseq without Python. Shapes, dtypes
// and errors are those of the Python functions of the same names.
namespace cuseq {

CUSEQ_API at::Tensor cu_seqlens(const at::Tensor& lengths);
CUSEQ_API at::Tensor max_seqlen(const at::Tensor& lengths);
CUSEQ_API at::Tensor last_token_indices(const at::Tensor& lengths);
CUSEQ_API at::Tensor position_ids(const at::Tensor& lengths, int64_t total_tokens);
CUSEQ_API at::Tensor seq_ids(const at::Tensor& lengths, int64_t total_tokens);

// The same through the identity cache.
CUSEQ_API at::Tensor cached_cu_seqlens(const at::Tensor& lengths);
CUSEQ_API at::Tensor cached_position_ids(const at::Tensor& lengths, int64_t total_tokens);
CUSEQ_API at::Tensor cached_seq_ids(const at::Tensor& lengths, int64_t total_tokens);

// Rows of many tensors by an index, in one launch (csrc/ops/gather_rows.cpp).
CUSEQ_API std::vector<at::Tensor> gather_rows(at::TensorList tensors, const at::Tensor& index,
                                              const at::Tensor& inverse, at::IntArrayRef rows,
                                              int64_t leading, at::ArrayRef<at::Scalar> fill);

// Where the real tokens of a row with padded segments lie, and which of them each token is; -1
// where there is none. int32 [total_tokens] both.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> segment_rows(const at::Tensor& cu_seqlens,
                                                          const at::Tensor& cu_seqlens_padded,
                                                          int64_t total_tokens);

// Which keys each token of a row may see.
struct MaskOptions {
  at::Tensor source;  // lengths, or their offsets
  c10::SymInt total_tokens;
  bool from_cu_seqlens = false;
  bool causal = true;
  std::optional<int64_t> window;
  std::optional<at::Tensor> spans;              // int32 [n_spans, 2]
  std::optional<at::Tensor> cu_seqlens_padded;  // where segments start, if longer than sequences
};

// The keys [first, end) of each token, int32 [2, total_tokens].
CUSEQ_API at::Tensor mask_ranges(const MaskOptions& options);
// [rows, 1, row_length, row_length]; bool unless there is a dtype.
CUSEQ_API at::Tensor dense_mask(const MaskOptions& options,
                                const std::optional<c10::SymInt>& row_length = std::nullopt,
                                std::optional<at::ScalarType> dtype = std::nullopt,
                                bool finite = false);
// The tensors of a FlexAttention BlockMask, in the order of its arguments.
CUSEQ_API std::vector<at::Tensor> block_mask(
    const at::Tensor& ranges, const std::optional<c10::SymInt>& row_length = std::nullopt,
    int64_t query_block = 128, int64_t key_block = 128);

// Raises where a window is below 1.
CUSEQ_API void check_window(std::optional<int64_t> window);

// Raises what is wrong with spans, and with rows that a sequence crosses. All tensors on the host.
CUSEQ_API void check_spans_and_rows(const at::Tensor& cu_seqlens,
                                    const std::optional<at::Tensor>& cu_seqlens_padded,
                                    int64_t total_tokens, const std::optional<at::Tensor>& spans,
                                    std::optional<int64_t> row_length);

// Masks through the identity cache. Lengths and offsets are keys of their own.
CUSEQ_API at::Tensor cached_mask_ranges(const MaskOptions& options);
CUSEQ_API at::Tensor cached_dense_mask(const MaskOptions& options,
                                       const std::optional<c10::SymInt>& row_length = std::nullopt,
                                       std::optional<at::ScalarType> dtype = std::nullopt,
                                       bool finite = false);
CUSEQ_API std::vector<at::Tensor> cached_block_mask(
    const MaskOptions& options, const std::optional<c10::SymInt>& row_length = std::nullopt,
    int64_t query_block = 128, int64_t key_block = 128);

// Exact attention inside each sequence of a packed row; returns (out, logsumexp).
CUSEQ_API std::tuple<at::Tensor, at::Tensor> varlen_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens, const std::optional<at::Tensor>& host_meta, bool causal = true,
    std::optional<int64_t> window = std::nullopt, std::optional<double> scale = std::nullopt,
    std::optional<int64_t> max_seqlen_bound = std::nullopt,
    const std::optional<at::Tensor>& spans = std::nullopt,
    const std::optional<at::Tensor>& cu_seqlens_padded = std::nullopt);

// Tokens that lengths, or offsets, on the host account for. Checks them.
CUSEQ_API int64_t tokens_of(const at::Tensor& source, bool is_cu_seqlens);

// Starts the one copy of device numbers to pinned memory that host code may later wait for, and
// returns where they will lie: vectors of one dtype. Never waits.
CUSEQ_API std::vector<at::Tensor> start_host_copy(const std::vector<at::Tensor>& on_device);

// Both int32 vectors, contiguous on the CPU, in one copy from pinned memory to the device. Never
// waits, where a copy from pageable memory would.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> copy_to_device(const at::Tensor& first,
                                                            const at::Tensor& second,
                                                            c10::Device device);

// Waits for the host copy of which the tensor is the first part, by its event, never for the
// stream. At once for any other tensor.
CUSEQ_API void wait_host_copy(const at::Tensor& on_host);

// Whether values on a device are checked, which waits for them: CUSEQ_CHECK=1. ValueError for what
// is neither 0 nor 1.
CUSEQ_API bool device_checks_enabled();

// One number of a host_meta (a HostMetaSlot of cuseq/seqlens.h), waited for and checked.
CUSEQ_API int64_t read_host_meta(const at::Tensor& host_meta, int64_t slot);

}  // namespace cuseq
