#include "ops/varlen_attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "cuseq/seqlens.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/masks.h"

namespace cuseq {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;
using OptionalSymInt = std::optional<c10::SymInt>;
using OptionalDouble = std::optional<double>;

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                           const Tensor&, const OptionalTensor&, bool, OptionalInt,
                                           OptionalDouble, OptionalSymInt, const OptionalTensor&,
                                           const OptionalTensor&);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const OptionalTensor&, bool,
                                                    OptionalInt, OptionalDouble, OptionalSymInt,
                                                    const OptionalTensor&, const OptionalTensor&);

const c10::TypedOperatorHandle<Forward>& forward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cuseq::varlen_attention", "")
                             .typed<Forward>();
  return op;
}

const c10::TypedOperatorHandle<Backward>& backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cuseq::varlen_attention_backward", "")
                             .typed<Backward>();
  return op;
}

void check_heads(const Tensor& tensor, const char* name, const Tensor& query) {
  TORCH_CHECK_VALUE(tensor.dim() == 3, name, " must have shape [tokens, heads, head_dim], got ",
                    tensor.sizes());
  TORCH_CHECK_VALUE(tensor.size(0) == query.size(0), name, " must have as many tokens as query, ",
                    query.size(0), ", got ", tensor.size(0));
  TORCH_CHECK_TYPE(tensor.is_floating_point() && tensor.scalar_type() == query.scalar_type(), name,
                   " must be floating point and of query's dtype, ", query.scalar_type(), ", got ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == query.device(), name, " must lie on query's device, ",
                    query.device(), ", got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.stride(2) == 1 || tensor.numel() == 0 || tensor.size(2) == 1, name,
                    " must be contiguous in its last dimension, got strides ", tensor.strides());
}

void check_inputs(const Tensor& query, const Tensor& key, const Tensor& value,
                  const Tensor& cu_seqlens) {
  TORCH_CHECK_VALUE(query.dim() == 3, "query must have shape [tokens, heads, head_dim], got ",
                    query.sizes());
  check_heads(query, "query", query);
  check_heads(key, "key", query);
  check_heads(value, "value", query);
  TORCH_CHECK_VALUE(key.size(1) == value.size(1), "key and value must have as many heads, got ",
                    key.size(1), " and ", value.size(1));
  TORCH_CHECK_VALUE(query.size(1) > 0, "query must have at least one head, got ", query.sizes());
  TORCH_CHECK_VALUE(key.size(1) > 0 && query.size(1) % key.size(1) == 0,
                    "query heads must be a multiple of key heads, got ", query.size(1), " and ",
                    key.size(1));
  TORCH_CHECK_VALUE(query.size(2) == key.size(2) && query.size(2) > 0 && value.size(2) > 0,
                    "query and key must have one head_dim above 0, got ", query.size(2), " and ",
                    key.size(2), " (value has ", value.size(2), ")");
  check_tokens(query.size(0));
  check_offsets(cu_seqlens);
  TORCH_CHECK_VALUE(cu_seqlens.device() == query.device(),
                    "cu_seqlens must lie on query's device, ", query.device(), ", got ",
                    cu_seqlens.device(), ": move the layout with packed.to(device)");
  check_offset_values(cu_seqlens, query.size(0));
}

// What the forward returned and its gradient, as whoever calls the backward by hand gives them.
void check_outputs(const Tensor& grad_out, const Tensor& out, const Tensor& logsumexp,
                   const Tensor& query, const Tensor& value) {
  const std::array<int64_t, 3> shape = {query.size(0), query.size(1), value.size(2)};
  const auto check = [&](const Tensor& tensor, const char* name, at::IntArrayRef sizes,
                         at::ScalarType dtype) {
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, " must have shape ", sizes, ", got ",
                      tensor.sizes());
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be of dtype ", dtype, ", got ",
                     tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.device() == query.device(), name, " must lie on query's device, ",
                      query.device(), ", got ", tensor.device());
  };
  check(grad_out, "grad_out", shape, query.scalar_type());
  check(out, "out", shape, query.scalar_type());
  check(logsumexp, "logsumexp", {query.size(1), query.size(0)},
        query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

void use_host_meta(const Tensor& host_meta, const Tensor& cu_seqlens, int64_t total_tokens,
                   AttentionPlan& plan) {
  const int32_t* meta = read_host_meta(host_meta);
  TORCH_CHECK_VALUE(meta[kTotalTokens] == total_tokens,
                    "query must have the layout's total_tokens = ", meta[kTotalTokens],
                    " tokens, got ", total_tokens);
  TORCH_CHECK_VALUE(meta[kNumSeqs] >= 0 && meta[kNumSeqs] < cu_seqlens.size(0),
                    "cu_seqlens must have at least the layout's n_seqs + 1 = ", meta[kNumSeqs] + 1,
                    " entries, got ", cu_seqlens.size(0));
  TORCH_CHECK_VALUE(meta[kMaxSeqlen] >= 0 && meta[kMaxSeqlen] <= meta[kNumRealTokens] &&
                        meta[kNumRealTokens] <= total_tokens,
                    "host_meta must hold max_seqlen <= num_real_tokens <= total_tokens, got ",
                    meta[kMaxSeqlen], ", ", meta[kNumRealTokens], ", ", total_tokens);
  plan.n_seqs = meta[kNumSeqs];
  plan.max_seqlen = meta[kMaxSeqlen];
  plan.num_real_tokens = meta[kNumRealTokens];
}

// A row whose segments have padding: the real tokens, moved together, are a row of their own, and
// nothing is computed with the others, whose outputs and gradients are zero.
struct RealRows {
  Tensor places;  // where each of them lies
  Tensor ranks;   // which of them each token is
  int64_t total_tokens;

  RealRows(const Tensor& cu_seqlens, const Tensor& padded, int64_t tokens, AttentionPlan& plan)
      : total_tokens(tokens) {
    const auto rows = cached_segment_rows(cu_seqlens, padded, tokens);
    const int64_t real = plan.num_real_tokens.value_or(tokens);
    places = std::get<0>(rows).narrow(0, 0, real);
    ranks = std::get<1>(rows);
    if (plan.spans.has_value()) {
      // On a device they may hold anything.
      const Tensor inside = plan.spans->to(at::kLong).clamp(0, tokens);
      const Tensor begins = ranks.index({inside.select(1, 0).clamp_max(tokens - 1)});
      const Tensor lasts = ranks.index({inside.select(1, 1).sub(1).clamp_min(0)});
      plan.spans = at::stack({begins, lasts.add(1)}, 1);
    }
  }

  std::vector<Tensor> gathered(at::TensorList tensors) const {
    return gather_rows(tensors, places, ranks, {places.size(0)}, 1,
                       std::vector<at::Scalar>(tensors.size(), 0));
  }

  std::vector<Tensor> scattered(at::TensorList tensors) const {
    return gather_rows(tensors, ranks, places, {total_tokens}, 1,
                       std::vector<at::Scalar>(tensors.size(), 0));
  }
};

// run(query, key, value, plan) attends over rows without padding inside.
template <typename Run>
AttentionOutput attend(const Tensor& query, const Tensor& key, const Tensor& value,
                       const Tensor& cu_seqlens, const OptionalTensor& padded, AttentionPlan plan,
                       const Run& run) {
  if (!padded.has_value()) return run(query, key, value, plan);
  const RealRows rows(cu_seqlens, *padded, query.size(0), plan);
  const auto real = rows.gathered({query, key, value});
  const auto [out, logsumexp] = run(real[0], real[1], real[2], plan);
  // In the order of the real tokens, for the backward alone.
  Tensor all = at::zeros({logsumexp.size(0), query.size(0)}, logsumexp.options());
  all.narrow(1, 0, logsumexp.size(1)).copy_(logsumexp);
  return {rows.scattered({out})[0], all};
}

template <typename Run>
AttentionGradients attend_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                   const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                   const Tensor& cu_seqlens, const OptionalTensor& padded,
                                   AttentionPlan plan, const Run& run) {
  if (!padded.has_value()) return run(grad_out, query, key, value, out, logsumexp, plan);
  const RealRows rows(cu_seqlens, *padded, query.size(0), plan);
  const auto real = rows.gathered({grad_out.contiguous(), query, key, value, out});
  const auto grads = run(real[0], real[1], real[2], real[3], real[4],
                         logsumexp.narrow(1, 0, real[0].size(0)).contiguous(), plan);
  const auto all = rows.scattered({std::get<0>(grads), std::get<1>(grads), std::get<2>(grads)});
  return {all[0], all[1], all[2]};
}

AttentionOutput attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& cu_seqlens, const OptionalTensor& host_meta,
                              bool causal, OptionalInt window, OptionalDouble scale,
                              OptionalInt max_seqlen_bound, const OptionalTensor& spans,
                              const OptionalTensor& padded) {
  const AttentionPlan plan = plan_attention(query, key, value, cu_seqlens, host_meta, causal,
                                            window, scale, max_seqlen_bound, spans, padded);
  return attend(query, key, value, cu_seqlens, padded, plan,
                [&](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionPlan& p) {
                  return segmented_attention(q, k, v, cu_seqlens, cu_seqlens, p);
                });
}

AttentionGradients attention_backward_cpu(const Tensor& grad_out, const Tensor& query,
                                          const Tensor& key, const Tensor& value, const Tensor& out,
                                          const Tensor& logsumexp, const Tensor& cu_seqlens,
                                          const OptionalTensor& host_meta, bool causal,
                                          OptionalInt window, OptionalDouble scale,
                                          OptionalInt max_seqlen_bound, const OptionalTensor& spans,
                                          const OptionalTensor& padded) {
  const AttentionPlan plan = plan_attention(query, key, value, cu_seqlens, host_meta, causal,
                                            window, scale, max_seqlen_bound, spans, padded);
  check_outputs(grad_out, out, logsumexp, query, value);
  return attend_backward(grad_out, query, key, value, out, logsumexp, cu_seqlens, padded, plan,
                         [&](const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& o, const Tensor& lse, const AttentionPlan& p) {
                           return segmented_attention_backward(g, q, k, v, o, lse, cu_seqlens,
                                                               cu_seqlens, p);
                         });
}

#ifdef CUSEQ_WITH_CUDA
// Offsets of the plan's sequences that stay inside the row and under the caller's bound. A layout's
// do; others may hold anything, and the kernels of PyTorch would follow them out of their tensors.
Tensor offsets_inside(const Tensor& cu_seqlens, const AttentionPlan& plan, int64_t total_tokens) {
  const Tensor offsets = cu_seqlens.narrow(0, 0, plan.n_seqs + 1);
  if (plan.num_real_tokens.has_value()) return offsets;
  Tensor inside = at::empty_like(offsets);
  ScanLengthsArgs args;
  args.source = offsets.const_data_ptr();
  args.source_is_offsets = true;
  args.n_seqs = plan.n_seqs;
  args.max_seqs = plan.n_seqs;
  args.limit = total_tokens;
  args.longest = plan.max_seqlen;
  args.cu_seqlens = inside.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(scan_lengths, offsets, args);
  return inside;
}

AttentionOutput attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& cu_seqlens, const OptionalTensor& host_meta,
                               bool causal, OptionalInt window, OptionalDouble scale,
                               OptionalInt max_seqlen_bound, const OptionalTensor& spans,
                               const OptionalTensor& padded) {
  const c10::cuda::CUDAGuard guard(query.device());
  const AttentionPlan plan = plan_attention(query, key, value, cu_seqlens, host_meta, causal,
                                            window, scale, max_seqlen_bound, spans, padded);
  const Tensor offsets = offsets_inside(cu_seqlens, plan, query.size(0));
  return attend(query, key, value, cu_seqlens, padded, plan,
                [&](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionPlan& p) {
                  return cuda_attention(q, k, v, cu_seqlens, offsets, p);
                });
}

AttentionGradients attention_backward_cuda(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const Tensor& cu_seqlens,
    const OptionalTensor& host_meta, bool causal, OptionalInt window, OptionalDouble scale,
    OptionalInt max_seqlen_bound, const OptionalTensor& spans, const OptionalTensor& padded) {
  const c10::cuda::CUDAGuard guard(query.device());
  const AttentionPlan plan = plan_attention(query, key, value, cu_seqlens, host_meta, causal,
                                            window, scale, max_seqlen_bound, spans, padded);
  check_outputs(grad_out, out, logsumexp, query, value);
  const Tensor offsets = offsets_inside(cu_seqlens, plan, query.size(0));
  return attend_backward(grad_out, query, key, value, out, logsumexp, cu_seqlens, padded, plan,
                         [&](const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& o, const Tensor& lse, const AttentionPlan& p) {
                           return cuda_attention_backward(g, q, k, v, o, lse, cu_seqlens, offsets,
                                                          p);
                         });
}
#endif

class VarlenAttention : public torch::autograd::Function<VarlenAttention> {
 public:
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& cu_seqlens, const OptionalTensor& host_meta, bool causal,
      OptionalInt window, OptionalDouble scale, const OptionalSymInt& max_seqlen_bound,
      const OptionalTensor& spans, const OptionalTensor& padded, Tensor* returned_logsumexp) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, logsumexp] = forward_op().call(query, key, value, cu_seqlens, host_meta, causal,
                                              window, scale, max_seqlen_bound, spans, padded);
    ctx->save_for_backward({query, key, value, out, logsumexp, cu_seqlens, or_undefined(host_meta),
                            or_undefined(spans), or_undefined(padded)});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["max_seqlen_bound"] = max_seqlen_bound;
    ctx->set_materialize_grads(false);
    // Beside autograd: compiled autograd takes no output that is marked as not differentiable.
    *returned_logsumexp = logsumexp;
    return {out};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& query = saved[0];
    if (!grads[0].defined()) return torch::autograd::variable_list(12);
    auto [grad_query, grad_key, grad_value] = backward_op().call(
        grads[0], query, saved[1], saved[2], saved[3], saved[4], saved[5], or_nullopt(saved[6]),
        ctx->saved_data["causal"].toBool(), ctx->saved_data["window"].toOptional<int64_t>(),
        ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["max_seqlen_bound"].toOptional<c10::SymInt>(), or_nullopt(saved[7]),
        or_nullopt(saved[8]));
    return {grad_query, grad_key, grad_value, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

// The gradient of the gradient is not implemented: asking for it raises instead of being zero.
class VarlenAttentionBackward : public torch::autograd::Function<VarlenAttentionBackward> {
 public:
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext*, const Tensor& grad_out, const Tensor& query,
      const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& logsumexp,
      const Tensor& cu_seqlens, const OptionalTensor& host_meta, bool causal, OptionalInt window,
      OptionalDouble scale, const OptionalSymInt& max_seqlen_bound, const OptionalTensor& spans,
      const OptionalTensor& padded) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [grad_query, grad_key, grad_value] =
        backward_op().call(grad_out, query, key, value, out, logsumexp, cu_seqlens, host_meta,
                           causal, window, scale, max_seqlen_bound, spans, padded);
    return {grad_query, grad_key, grad_value};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cuseq::varlen_attention cannot be differentiated twice: its kernels have no second "
        "derivative; use eager attention where you need create_graph=True");
  }
};

std::tuple<Tensor, Tensor> attention_autograd(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens,
    const OptionalTensor& host_meta, bool causal, OptionalInt window, OptionalDouble scale,
    OptionalSymInt max_seqlen_bound, const OptionalTensor& spans, const OptionalTensor& padded) {
  refuse_forward_mode({query, key, value}, "cuseq::varlen_attention");
  if (!any_requires_grad({query, key, value})) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return forward_op().call(query, key, value, cu_seqlens, host_meta, causal, window, scale,
                             max_seqlen_bound, spans, padded);
  }
  Tensor logsumexp;
  auto outputs = VarlenAttention::apply(query, key, value, cu_seqlens, host_meta, causal, window,
                                        scale, max_seqlen_bound, spans, padded, &logsumexp);
  return {outputs[0], logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_autograd(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const Tensor& cu_seqlens,
    const OptionalTensor& host_meta, bool causal, OptionalInt window, OptionalDouble scale,
    OptionalSymInt max_seqlen_bound, const OptionalTensor& spans, const OptionalTensor& padded) {
  refuse_forward_mode({grad_out, query, key, value, out}, "cuseq::varlen_attention");
  if (!any_requires_grad({grad_out, query, key, value, out})) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return backward_op().call(grad_out, query, key, value, out, logsumexp, cu_seqlens, host_meta,
                              causal, window, scale, max_seqlen_bound, spans, padded);
  }
  auto grads = VarlenAttentionBackward::apply(grad_out, query, key, value, out, logsumexp,
                                              cu_seqlens, host_meta, causal, window, scale,
                                              max_seqlen_bound, spans, padded);
  return {grads[0], grads[1], grads[2]};
}

// As scaled_dot_product_attention does: the lower precision of the region, for all three.
template <c10::DeviceType device>
std::tuple<Tensor, Tensor> attention_autocast(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens,
    const OptionalTensor& host_meta, bool causal, OptionalInt window, OptionalDouble scale,
    OptionalSymInt max_seqlen_bound, const OptionalTensor& spans, const OptionalTensor& padded) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return forward_op().call(at::autocast::cached_cast(dtype, query, device),
                           at::autocast::cached_cast(dtype, key, device),
                           at::autocast::cached_cast(dtype, value, device), cu_seqlens, host_meta,
                           causal, window, scale, max_seqlen_bound, spans, padded);
}

}  // namespace

AttentionPlan plan_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& cu_seqlens, const OptionalTensor& host_meta, bool causal,
                             OptionalInt window, OptionalDouble scale, OptionalInt max_seqlen_bound,
                             const OptionalTensor& spans, const OptionalTensor& padded) {
  check_inputs(query, key, value, cu_seqlens);
  check_padded_offsets(padded, cu_seqlens, query.size(0));
  check_window(window);
  TORCH_CHECK_VALUE(!max_seqlen_bound.has_value() || *max_seqlen_bound >= 1,
                    "max_seqlen_bound must be at least the longest length, and 1, got ",
                    max_seqlen_bound.value_or(0));
  TORCH_CHECK_VALUE(!scale.has_value() || (std::isfinite(*scale) && *scale > 0),
                    "scale must be a finite number above 0, got ", scale.value_or(0));
  const int64_t total_tokens = query.size(0);
  AttentionPlan plan;
  plan.causal = causal;
  plan.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(2))));
  if (host_meta.has_value() && !is_capturing(query)) {
    use_host_meta(*host_meta, cu_seqlens, total_tokens, plan);
  } else {
    // Only the device knows the lengths, or a graph will replay with others.
    plan.n_seqs = cu_seqlens.size(0) - 1;
    plan.max_seqlen = std::min(max_seqlen_bound.value_or(total_tokens), total_tokens);
    if (cu_seqlens.is_cpu()) {
      plan.max_seqlen = total_tokens;
      plan.num_real_tokens = cu_seqlens.const_data_ptr<int32_t>()[plan.n_seqs];
    }
  }
  // A window that reaches over the longest sequence hides nothing. The caller's bound is no proof.
  const int64_t longest = plan.num_real_tokens.has_value() ? plan.max_seqlen : total_tokens;
  if (window.has_value() && *window < longest) plan.window = window;
  if (spans.has_value()) {
    check_spans(*spans, cu_seqlens);
    if (values_can_be_read(cu_seqlens)) {
      const auto segments = padded.has_value() ? OptionalTensor(padded->cpu()) : std::nullopt;
      check_spans_and_rows(cu_seqlens.cpu(), segments, total_tokens, spans->cpu(),
                           /*row_length=*/std::nullopt);
    }
    plan.spans = spans;
  }
  return plan;
}

Tensor aligned_rows(const Tensor& rows) {
  constexpr int64_t kBytes = 16;
  const auto is_aligned = [&](int64_t elements) {
    return elements * static_cast<int64_t>(rows.element_size()) % kBytes == 0;
  };
  const auto address = reinterpret_cast<uintptr_t>(rows.const_data_ptr());
  const bool aligned =
      address % kBytes == 0 && is_aligned(rows.stride(0)) && is_aligned(rows.stride(1));
  return aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

Tensor pad_last_dim(const Tensor& tensor, int64_t size) {
  const int64_t missing = size - tensor.size(-1);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing});
}

std::tuple<Tensor, Tensor> varlen_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens,
    const OptionalTensor& host_meta, bool causal, OptionalInt window, OptionalDouble scale,
    OptionalInt max_seqlen_bound, const OptionalTensor& spans, const OptionalTensor& padded) {
  return forward_op().call(
      query, key, value, cu_seqlens, host_meta, causal, window, scale,
      max_seqlen_bound.has_value() ? OptionalSymInt(*max_seqlen_bound) : std::nullopt, spans,
      padded);
}

TORCH_LIBRARY_IMPL(cuseq, CPU, m) {
  m.impl("varlen_attention", TORCH_FN(attention_cpu));
  m.impl("varlen_attention_backward", TORCH_FN(attention_backward_cpu));
}

#ifdef CUSEQ_WITH_CUDA
TORCH_LIBRARY_IMPL(cuseq, CUDA, m) {
  m.impl("varlen_attention", TORCH_FN(attention_cuda));
  m.impl("varlen_attention_backward", TORCH_FN(attention_backward_cuda));
}
#endif

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) {
  m.impl("varlen_attention", TORCH_FN(attention_autograd));
  m.impl("varlen_attention_backward", TORCH_FN(attention_backward_autograd));
}

TORCH_LIBRARY_IMPL(cuseq, AutocastCPU, m) {
  m.impl("varlen_attention", TORCH_FN(attention_autocast<at::kCPU>));
}

TORCH_LIBRARY_IMPL(cuseq, AutocastCUDA, m) {
  m.impl("varlen_attention", TORCH_FN(attention_autocast<at::kCUDA>));
}

}  // namespace cuseq
