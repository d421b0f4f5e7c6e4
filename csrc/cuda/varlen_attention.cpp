#include "ops/varlen_attention.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "cuseq/cache.h"
#include "cuseq/seqlens.h"
#include "kernels/kernels.h"
#include "ops/checks.h"

// Attention over PyTorch's own varlen kernels: flash where it takes the inputs, else the
// memory-efficient kernel, else dense kernels segment by segment. All exact, and only the last
// needs offsets on the host. flash is called through the dispatcher, where FA3 or FA4 stand in its
// place once torch.nn.attention.activate_flash_attention_impl was called.
namespace cuseq {
namespace {

using at::Tensor;

enum class Backend { kFlash, kEfficient, kSegments };

constexpr int64_t kFlashHeadDimMultiple = 8;
constexpr int64_t kFlashMaxHeadDim = 256;

bool gpu_has_flash() { return at::cuda::getCurrentDeviceProperties()->major >= 8; }

int64_t flash_head_dim(const Tensor& query, const Tensor& value) {
  return round_up(std::max(query.size(2), value.size(2)), kFlashHeadDimMultiple);
}

Backend choose_backend(const Tensor& query, const Tensor& value, const AttentionPlan& plan) {
  if (plan.spans.has_value()) return Backend::kSegments;  // which no varlen kernel knows
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (half && flash_head_dim(query, value) <= kFlashMaxHeadDim && gpu_has_flash()) {
    return Backend::kFlash;
  }
  const bool wide = query.scalar_type() == at::kDouble;
  const bool two_sided_window = plan.window.has_value() && !plan.causal;
  if (wide || two_sided_window) {
    TORCH_WARN_ONCE("cuseq.varlen_attention: no varlen kernel takes ", query.scalar_type(),
                    two_sided_window ? " with a two-sided window" : "",
                    " here, so sequences run one by one, and offsets that only the device knows "
                    "are copied to the host once, a synchronisation");
    return Backend::kSegments;
  }
  TORCH_WARN_ONCE(
      "cuseq.varlen_attention: flash attention takes fp16 and bf16, head_dim up to 256 "
      "and GPUs from sm_80 on, got ",
      query.scalar_type(), " and head_dim ", query.size(2),
      "; PyTorch's memory-efficient kernel runs instead, exact but slower");
  return Backend::kEfficient;
}

// True on the rows that no sequence owns, where only the device knows them.
Tensor tail_mask(const Tensor& offsets, int64_t total_tokens) {
  return at::arange(total_tokens, offsets.options()).ge(offsets.select(0, offsets.size(0) - 1));
}

// Kernels leave the tail of what they return uninitialised, and one NaN there would poison weight
// gradients.
void zero_tail(std::initializer_list<Tensor> rows, const Tensor& offsets,
               const AttentionPlan& plan) {
  const int64_t total_tokens = rows.begin()->size(0);
  if (plan.num_real_tokens.has_value()) {
    const int64_t tail = total_tokens - *plan.num_real_tokens;
    if (tail == 0) return;
    for (const Tensor& tensor : rows) tensor.narrow(0, *plan.num_real_tokens, tail).zero_();
    return;
  }
  const Tensor mask = tail_mask(offsets, total_tokens);
  for (const Tensor& tensor : rows) {
    tensor.masked_fill_(tensor.dim() == 3 ? mask.unsqueeze(1).unsqueeze(2) : mask.unsqueeze(1), 0);
  }
}

// The first `size` of the last dimension, contiguous; the tensor itself where that is what it is.
Tensor unpad_last_dim(const Tensor& tensor, int64_t size) {
  return (tensor.size(-1) == size ? tensor : tensor.narrow(-1, 0, size)).contiguous();
}

// flash counts the keys beside the query, we count the query too. Without a window both are absent:
// FA4 behind PyTorch's operator takes any bound for a window, and has no backward for windows.
struct FlashWindow {
  std::optional<int64_t> left;
  std::optional<int64_t> right;

  explicit FlashWindow(const AttentionPlan& plan) {
    if (!plan.window.has_value()) return;
    left = *plan.window - 1;
    right = plan.causal ? 0 : *left;
  }
};

// A longest length of 1 makes flash take a decoding path that assumes a row without a tail.
int64_t flash_max_seqlen(const AttentionPlan& plan) {
  return std::max<int64_t>(plan.max_seqlen, 2);
}

// It loads 16 bytes at a time and checks nothing: rows off alignment end in a misaligned address.
Tensor flash_rows(const Tensor& rows, int64_t head_dim) {
  return aligned_rows(pad_last_dim(rows, head_dim));
}

AttentionOutput flash_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& offsets, const AttentionPlan& plan) {
  const int64_t head_dim = flash_head_dim(query, value);
  const int64_t max_seqlen = flash_max_seqlen(plan);
  const FlashWindow window(plan);
  auto result = at::_flash_attention_forward(
      flash_rows(query, head_dim), flash_rows(key, head_dim), flash_rows(value, head_dim), offsets,
      offsets, max_seqlen, max_seqlen, /*dropout_p=*/0.0, plan.causal,
      /*return_debug_mask=*/false, plan.scale, window.left, window.right);
  Tensor out = unpad_last_dim(std::get<0>(result), value.size(2));
  Tensor logsumexp = std::get<1>(result);
  zero_tail({out, logsumexp.t()}, offsets, plan);
  return {out, logsumexp};
}

AttentionGradients flash_backward_once(const Tensor& grad_out, const Tensor& query,
                                       const Tensor& key, const Tensor& value, const Tensor& out,
                                       const Tensor& logsumexp, const Tensor& offsets,
                                       const AttentionPlan& plan) {
  const int64_t max_seqlen = flash_max_seqlen(plan);
  const FlashWindow window(plan);
  const Tensor no_dropout_state = at::empty({2}, query.options().dtype(at::kLong));
  return at::_flash_attention_backward(grad_out, query, key, value, out, logsumexp, offsets,
                                       offsets, max_seqlen, max_seqlen, /*dropout_p=*/0.0,
                                       plan.causal, no_dropout_state, no_dropout_state, plan.scale,
                                       window.left, window.right);
}

// flash-attention 2 indexes its backward workspace of (tokens + 128 * n_seqs) x heads x head_dim
// with 32 bits (unsloth#8957). Heads are independent, so as many go into one call as fit.
int64_t heads_per_backward(const Tensor& query, int64_t n_seqs) {
  const int64_t head_dim = query.size(2) <= 192 ? round_up(query.size(2), 32) : 256;
  const int64_t per_head = (query.size(0) + 128 * (n_seqs + 1)) * head_dim;
  const int64_t heads = std::numeric_limits<int32_t>::max() / per_head;
  TORCH_CHECK(heads >= 1,
              "flash attention's backward indexes (tokens + 128 * n_seqs) * head_dim "
              "with 32 bits, and this pack needs ",
              per_head, ": use shorter rows, or fewer sequences in one");
  return heads;
}

AttentionGradients flash_backward_by_heads(const Tensor& grad_out, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& logsumexp,
                                           const Tensor& offsets, const AttentionPlan& plan,
                                           int64_t heads_per_call) {
  const int64_t group = query.size(1) / key.size(1);
  Tensor grad_query = at::empty(query.sizes(), query.options());
  Tensor grad_key = at::zeros(key.sizes(), key.options());
  Tensor grad_value = at::zeros(value.sizes(), value.options());
  // Whole groups while they fit, else parts of one group, whose key gradients add up.
  const int64_t key_step = std::max<int64_t>(1, heads_per_call / group);
  const int64_t query_step = heads_per_call >= group ? key_step * group : heads_per_call;
  for (int64_t k = 0; k < key.size(1); k += key_step) {
    const int64_t keys = std::min(key_step, key.size(1) - k);
    const int64_t end = (k + keys) * group;
    for (int64_t q = k * group; q < end; q += query_step) {
      const int64_t queries = std::min(query_step, end - q);
      const auto heads = [](const Tensor& tensor, int64_t first, int64_t count) {
        return tensor.narrow(1, first, count);
      };
      auto [dq, dk, dv] =
          flash_backward_once(heads(grad_out, q, queries), heads(query, q, queries),
                              heads(key, k, keys), heads(value, k, keys), heads(out, q, queries),
                              logsumexp.narrow(0, q, queries).contiguous(), offsets, plan);
      heads(grad_query, q, queries).copy_(dq);
      heads(grad_key, k, keys).add_(dk);
      heads(grad_value, k, keys).add_(dv);
    }
  }
  return {grad_query, grad_key, grad_value};
}

AttentionGradients flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                  const Tensor& offsets, const AttentionPlan& plan) {
  const int64_t head_dim = flash_head_dim(query, value);
  const Tensor q = flash_rows(query, head_dim);
  const Tensor k = flash_rows(key, head_dim);
  const Tensor v = flash_rows(value, head_dim);
  const Tensor o = flash_rows(out, head_dim);
  const Tensor grad_o = flash_rows(grad_out.contiguous(), head_dim);
  const Tensor lse = logsumexp.contiguous();
  const int64_t heads_per_call = heads_per_backward(q, plan.n_seqs);
  auto [grad_query, grad_key, grad_value] =
      heads_per_call >= q.size(1)
          ? flash_backward_once(grad_o, q, k, v, o, lse, offsets, plan)
          : flash_backward_by_heads(grad_o, q, k, v, o, lse, offsets, plan, heads_per_call);
  grad_query = unpad_last_dim(grad_query, query.size(2));
  grad_key = unpad_last_dim(grad_key, key.size(2));
  grad_value = unpad_last_dim(grad_value, value.size(2));
  zero_tail({grad_query, grad_key, grad_value}, offsets, plan);
  return {grad_query, grad_key, grad_value};
}

// The memory-efficient kernel wants [1, tokens, heads, dim] with as many key heads as query heads.
Tensor efficient_rows(const Tensor& rows, int64_t heads) {
  const int64_t group = heads / rows.size(1);
  const Tensor expanded =
      group == 1 ? aligned_rows(rows) : rows.unsqueeze(2).expand({-1, -1, group, -1}).flatten(1, 2);
  // Before sm_80 it has no bf16.
  const bool narrow = expanded.scalar_type() == at::kBFloat16 && !gpu_has_flash();
  return (narrow ? expanded.to(at::kFloat) : expanded).unsqueeze(0);
}

Tensor reduce_groups(const Tensor& rows, int64_t heads) {
  const int64_t group = rows.size(1) / heads;
  return group == 1 ? rows : rows.unflatten(1, {heads, group}).sum(2);
}

// 1 is a causal mask aligned at the top left, which for equal lengths is the only one.
int64_t efficient_mask_type(const AttentionPlan& plan) { return plan.causal ? 1 : 0; }

// Its logsumexp is [n_seqs, heads, longest rounded up to 32], ours is [heads, tokens]: these two
// functions take the one to the other.
Tensor unpad_logsumexp(const Tensor& padded, const Tensor& offsets, int64_t total_tokens) {
  Tensor positions = at::empty({total_tokens}, offsets.options());
  Tensor segments = at::empty({total_tokens}, offsets.options());
  TokenMetadataArgs args;
  args.segments = segments_of(offsets, std::nullopt, total_tokens);
  args.position_ids = positions.mutable_data_ptr<int32_t>();
  args.seq_ids = segments.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(token_metadata, offsets, args);
  // The tail has no place in it and reads any: the caller zeroes it.
  const Tensor rows = segments.clamp_max_(padded.size(0) - 1).to(at::kLong);
  const Tensor columns = positions.clamp_(0, padded.size(2) - 1).to(at::kLong);
  return padded.transpose(1, 2).index({rows, columns}).t().contiguous();
}

AttentionOutput efficient_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const Tensor& offsets, const AttentionPlan& plan) {
  const int64_t heads = query.size(1);
  auto result = at::_efficient_attention_forward(
      efficient_rows(query, heads), efficient_rows(key, heads), efficient_rows(value, heads),
      /*bias=*/std::nullopt, offsets, offsets, plan.max_seqlen, plan.max_seqlen, /*dropout_p=*/0.0,
      efficient_mask_type(plan), /*compute_log_sumexp=*/true, plan.scale,
      /*seqlen_k=*/std::nullopt, plan.window);
  Tensor out = std::get<0>(result).squeeze(0).to(query.scalar_type()).contiguous();
  Tensor logsumexp = unpad_logsumexp(std::get<1>(result), offsets, query.size(0));
  zero_tail({out, logsumexp.t()}, offsets, plan);
  return {out, logsumexp};
}

Tensor pad_logsumexp(const Tensor& logsumexp, const Tensor& offsets, const AttentionPlan& plan) {
  const Tensor places = at::arange(round_up(plan.max_seqlen, 32), offsets.options()).unsqueeze(0);
  const Tensor tokens = offsets.narrow(0, 0, plan.n_seqs).unsqueeze(1).add(places);
  const Tensor real = tokens.lt(offsets.narrow(0, 1, plan.n_seqs).unsqueeze(1));
  const Tensor values = logsumexp.t().index({tokens.clamp(0, logsumexp.size(1) - 1).to(at::kLong)});
  // Rows past the end of a sequence must not contribute: exp(score - inf) is zero.
  return at::where(real.unsqueeze(2), values,
                   at::full_like(values, std::numeric_limits<double>::infinity()))
      .transpose(1, 2)
      .contiguous();
}

AttentionGradients efficient_backward(const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value, const Tensor& out,
                                      const Tensor& logsumexp, const Tensor& offsets,
                                      const AttentionPlan& plan) {
  const int64_t heads = query.size(1);
  const Tensor padded = pad_logsumexp(logsumexp, offsets, plan);
  const Tensor no_dropout_state = at::empty({}, query.options().dtype(at::kLong));
  auto result = at::_efficient_attention_backward(
      efficient_rows(grad_out.contiguous(), heads), efficient_rows(query, heads),
      efficient_rows(key, heads), efficient_rows(value, heads), /*bias=*/std::nullopt,
      efficient_rows(out, heads), offsets, offsets, plan.max_seqlen, plan.max_seqlen, padded,
      /*dropout_p=*/0.0, no_dropout_state, no_dropout_state, efficient_mask_type(plan),
      /*bias_requires_grad=*/false, plan.scale, /*num_splits_key=*/std::nullopt, plan.window);
  const auto finish = [&](const Tensor& grad, const Tensor& like) {
    return reduce_groups(grad.squeeze(0), like.size(1)).to(like.scalar_type()).contiguous();
  };
  Tensor grad_query = finish(std::get<0>(result), query);
  Tensor grad_key = finish(std::get<1>(result), key);
  Tensor grad_value = finish(std::get<2>(result), value);
  zero_tail({grad_query, grad_key, grad_value}, offsets, plan);
  return {grad_query, grad_key, grad_value};
}

// A layout's are brought there once, or never left it; others are copied in each call.
Tensor offsets_on_host(const Tensor& cu_seqlens, const Tensor& offsets, const AttentionPlan& plan) {
  TORCH_CHECK(!is_capturing(offsets),
              "varlen_attention with these inputs runs sequence by sequence and needs offsets on "
              "the host, which a CUDA graph capture cannot copy: use fp16 or bf16, without spans");
  const Tensor host = plan.num_real_tokens.has_value() ? cached_on_host(cu_seqlens) : offsets.cpu();
  TORCH_CHECK_VALUE(host.size(0) > plan.n_seqs,
                    "host_meta must be of the layout of cu_seqlens: it "
                    "says n_seqs = ",
                    plan.n_seqs, ", but there are ", host.size(0), " offsets");
  return host;
}

}  // namespace

AttentionOutput cuda_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& cu_seqlens, const Tensor& offsets,
                               const AttentionPlan& plan) {
  if (plan.n_seqs == 0 || plan.max_seqlen == 0) {
    const auto lse_type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return {at::zeros({query.size(0), query.size(1), value.size(2)}, query.options()),
            at::zeros({query.size(1), query.size(0)}, query.options().dtype(lse_type))};
  }
  switch (choose_backend(query, value, plan)) {
    case Backend::kFlash:
      return flash_forward(query, key, value, offsets, plan);
    case Backend::kEfficient:
      return efficient_forward(query, key, value, offsets, plan);
    case Backend::kSegments:
      break;
  }
  return segmented_attention(query, key, value, offsets, offsets_on_host(cu_seqlens, offsets, plan),
                             plan);
}

AttentionGradients cuda_attention_backward(const Tensor& grad_out, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& logsumexp,
                                           const Tensor& cu_seqlens, const Tensor& offsets,
                                           const AttentionPlan& plan) {
  if (plan.n_seqs == 0 || plan.max_seqlen == 0) {
    return {at::zeros(query.sizes(), query.options()), at::zeros(key.sizes(), key.options()),
            at::zeros(value.sizes(), value.options())};
  }
  switch (choose_backend(query, value, plan)) {
    case Backend::kFlash:
      return flash_backward(grad_out, query, key, value, out, logsumexp, offsets, plan);
    case Backend::kEfficient:
      return efficient_backward(grad_out, query, key, value, out, logsumexp, offsets, plan);
    case Backend::kSegments:
      break;
  }
  return segmented_attention_backward(grad_out, query, key, value, out, logsumexp, offsets,
                                      offsets_on_host(cu_seqlens, offsets, plan), plan);
}

}  // namespace cuseq
