#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace cuseq {

// What the back ends need to know of one attention call, checked and with defaults filled in.
struct AttentionPlan {
  int64_t n_seqs = 0;
  int64_t max_seqlen = 0;  // exact, or a bound where only the device knows
  std::optional<int64_t> num_real_tokens;
  bool causal = true;
  std::optional<int64_t> window;    // keys that a query sees, itself included; none where all fit
  std::optional<at::Tensor> spans;  // int32 [n_spans, 2]
  double scale = 1.0;
};

AttentionPlan plan_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const at::Tensor& cu_seqlens,
                             const std::optional<at::Tensor>& host_meta, bool causal,
                             std::optional<int64_t> window, std::optional<double> scale,
                             std::optional<int64_t> max_seqlen_bound,
                             const std::optional<at::Tensor>& spans,
                             const std::optional<at::Tensor>& cu_seqlens_padded);

// Back ends take THD tensors and the offsets of exactly plan.n_seqs sequences. Outputs and
// gradients are contiguous and zero on the tail; logsumexp is [heads, tokens] in fp32 (fp64 for
// fp64 inputs).
using AttentionOutput = std::tuple<at::Tensor, at::Tensor>;
using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Segment by segment with dense kernels, for the CPU and for what no CUDA varlen kernel takes. The
// offsets twice: where the inputs lie, and on the host.
AttentionOutput segmented_attention(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const at::Tensor& offsets,
                                    const at::Tensor& host_offsets, const AttentionPlan& plan);
AttentionGradients segmented_attention_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                                const at::Tensor& key, const at::Tensor& value,
                                                const at::Tensor& out, const at::Tensor& logsumexp,
                                                const at::Tensor& offsets,
                                                const at::Tensor& host_offsets,
                                                const AttentionPlan& plan);

#ifdef CUSEQ_WITH_CUDA
// `offsets` are those of cu_seqlens, inside the row, of exactly plan.n_seqs sequences.
AttentionOutput cuda_attention(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& cu_seqlens,
                               const at::Tensor& offsets, const AttentionPlan& plan);
AttentionGradients cuda_attention_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const at::Tensor& out, const at::Tensor& logsumexp,
                                           const at::Tensor& cu_seqlens, const at::Tensor& offsets,
                                           const AttentionPlan& plan);
#endif

// The tensor itself where its rows start at multiples of 16 bytes, as the kernels of PyTorch want
// them, else a copy.
at::Tensor aligned_rows(const at::Tensor& rows);

// The last dimension filled up with zeros to `size`; the tensor itself where it has that size.
at::Tensor pad_last_dim(const at::Tensor& tensor, int64_t size);

}  // namespace cuseq
