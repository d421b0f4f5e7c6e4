#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/backend.h"
#include "attention/rows.h"
#include "cuseq/seqlens.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"

// PyTorch's memory-efficient kernel: for fp32, wide heads and GPUs without flash attention.
namespace cuseq::attention::efficient_backend {
namespace {

bool takes(const Call& call, std::string* why) {
  if (!call.q.is_cuda()) return refuse(why, "it runs on CUDA, got a tensor on the CPU");
  if (call.q.scalar_type() == at::kDouble) {
    return refuse(why, "it takes fp16, bf16 and fp32, got fp64");
  }
  if (const char* extra = call.extra()) return refuse(why, "it has no ", extra);
  if (call.window.has_value() && !call.causal) return refuse(why, "it has no two-sided window");
  // kernel_backward.h of torch 2.11 shifts the causal diagonal by num_keys - num_queries, but not
  // the window's lower bound: gradients would flow to keys that the forward hides.
  if (call.window.has_value() && !call.is_of_one_row()) {
    return refuse(why, "its backward misplaces windows over keys of another row");
  }
  return true;
}

void warn(const Call& call) {
  TORCH_WARN_ONCE(
      "cuseq.varlen_attention: flash attention takes fp16 and bf16, head_dim up to 256 "
      "and GPUs from sm_80 on, got ",
      dtype_name(call.q.scalar_type()), " and head_dim ", call.q.size(2),
      "; PyTorch's memory-efficient kernel runs instead, exact but slower");
}

bool has_bf16() { return at::cuda::getCurrentDeviceProperties()->major >= 8; }

// Return rows with dim filled up with zeros to a multiple of 16 bytes. From sm_80 on there is no
// kernel for other heads.
Tensor efficient_rows(const Tensor& rows) {
  const Tensor padded = aligned_rows(
      pad_last_dim(rows, round_up(rows.size(2), 16 / static_cast<int64_t>(rows.element_size()))));
  // The kernel does not support bf16 before sm_80.
  const bool narrow = padded.scalar_type() == at::kBFloat16 && !has_bf16();
  return narrow ? padded.to(at::kFloat) : padded;
}

// Deals the heads to calls of the kernel, which takes as many key heads as query heads. A call has
// either one key head, which its query heads share by a stride of zero, or all key heads, each with
// one query head of its group: whichever makes fewer calls. So keys and values are never repeated.
//
// Worked example: 16 query and 8 key heads make 2 calls, with query heads 0, 2, 4, ... and 1, 3, 5,
// ...; 8 query and 2 key heads make 2 calls, with query heads 0 to 3 and 4 to 7.
class HeadParts {
 public:
  explicit HeadParts(const Call& call)
      : key_heads_(call.k.size(1)),
        group_(call.q.size(1) / key_heads_),
        shares_key_(key_heads_ <= group_) {}

  int64_t count() const { return std::min(key_heads_, group_); }

  // Return a part of a tensor that has the query heads in dimension 1.
  Tensor queries(const Tensor& tensor, int64_t part) const {
    return shares_key_ ? tensor.narrow(1, part * group_, group_)
                       : tensor.unflatten(1, {key_heads_, group_}).select(2, part);
  }

  // Return a part of rows that have the key heads in dimension 1.
  Tensor keys(const Tensor& rows, int64_t part) const {
    return shares_key_ ? rows.narrow(1, part, 1).expand({-1, group_, -1}) : rows;
  }

  // Undo `queries`, given all parts.
  Tensor join_queries(const std::vector<Tensor>& parts) const {
    if (parts.size() == 1) return parts.front();
    return shares_key_ ? at::cat(parts, 1) : at::stack(parts, 2).flatten(1, 2);
  }

  // Add the gradient of one part of the keys to those of the parts before it.
  void add_keys(std::vector<Tensor>& found, const Tensor& grad) const {
    if (group_ == 1) {
      found.push_back(grad);
    } else if (shares_key_) {
      found.push_back(grad.sum(1, /*keepdim=*/true));
    } else if (found.empty()) {
      found.push_back(grad.to(at::kFloat));  // so that a sum of halves is rounded once
    } else {
      found.front().add_(grad);
    }
  }

  Tensor join_keys(const std::vector<Tensor>& found) const {
    return found.size() == 1 ? found.front() : at::cat(found, 1);
  }

 private:
  int64_t key_heads_;
  int64_t group_;  // query heads of a key head
  bool shares_key_;
};

// 1 is a causal mask aligned at the top left, 2 at the bottom right.
int64_t mask_type(const Call& call) {
  if (!call.causal) return 0;
  return call.is_of_one_row() ? 1 : 2;
}

// The kernel's logsumexp is [n_seqs, heads, longest rounded up to 32], ours is [heads, tokens].
// unpad_logsumexp and pad_logsumexp convert between them.
Tensor unpad_logsumexp(const Tensor& padded, const Tensor& offsets, int64_t total_tokens) {
  const auto [positions, segments] = positions_and_seq_ids(offsets, total_tokens);
  // The tail has no entry, so it reads an arbitrary one; the caller zeroes it.
  const Tensor rows = segments.clamp_max_(padded.size(0) - 1).to(at::kLong);
  const Tensor columns = positions.clamp_(0, padded.size(2) - 1).to(at::kLong);
  return padded.transpose(1, 2).index({rows, columns}).t().contiguous();
}

std::optional<Output> forward(const Call& call) {
  const Tensor q = efficient_rows(call.q);
  const Tensor k = efficient_rows(call.k);
  const Tensor v = efficient_rows(call.v);
  const HeadParts parts(call);
  std::vector<Tensor> outs, logsumexps;
  for (int64_t part = 0; part < parts.count(); ++part) {
    auto result = at::_efficient_attention_forward(
        parts.queries(q, part).unsqueeze(0), parts.keys(k, part).unsqueeze(0),
        parts.keys(v, part).unsqueeze(0), /*bias=*/std::nullopt, call.queries.offsets,
        call.keys.offsets, call.queries.longest, call.keys.longest, /*dropout_p=*/0.0,
        mask_type(call), /*compute_log_sumexp=*/true, call.scale, /*seqlen_k=*/std::nullopt,
        call.window);
    outs.push_back(std::get<0>(result).squeeze(0));
    logsumexps.push_back(std::get<1>(result));
  }
  Tensor out = unpad_last_dim(parts.join_queries(outs), call.v.size(2)).to(call.q.scalar_type());
  Tensor logsumexp =
      unpad_logsumexp(parts.join_queries(logsumexps), call.queries.offsets, call.q.size(0));
  if (call.may_lack_keys()) {
    const Tensor alone = queries_without_keys(call);
    out.masked_fill_(alone.unsqueeze(1).unsqueeze(2), 0);
    logsumexp.masked_fill_(alone.unsqueeze(0), -std::numeric_limits<double>::infinity());
  }
  zero_tail({out, logsumexp.t()}, call.queries);
  return Output{out, logsumexp};
}

Tensor pad_logsumexp(const Tensor& logsumexp, const Sequences& sequences) {
  const Tensor& offsets = sequences.offsets;
  const Tensor places = at::arange(round_up(sequences.longest, 32), offsets.options()).unsqueeze(0);
  const Tensor tokens = offsets.narrow(0, 0, sequences.count()).unsqueeze(1).add(places);
  const Tensor real = tokens.lt(offsets.narrow(0, 1, sequences.count()).unsqueeze(1));
  const Tensor values = logsumexp.t().index({tokens.clamp(0, logsumexp.size(1) - 1).to(at::kLong)});
  // Rows past the end of a sequence must not contribute: exp(score - inf) is zero.
  return at::where(real.unsqueeze(2), values,
                   at::full_like(values, std::numeric_limits<double>::infinity()))
      .transpose(1, 2)
      .contiguous();
}

std::optional<Gradients> backward(const Call& call, const Outer& outer) {
  const Tensor q = efficient_rows(call.q);
  const Tensor k = efficient_rows(call.k);
  const Tensor v = efficient_rows(call.v);
  const Tensor out = efficient_rows(outer.out);
  const Tensor grad_out = efficient_rows(outer.grad_out.contiguous());
  const Tensor padded = pad_logsumexp(outer.logsumexp, call.queries);
  const Tensor no_dropout_state = at::empty({}, call.q.options().dtype(at::kLong));
  const HeadParts parts(call);
  std::vector<Tensor> grads_q, grads_k, grads_v;
  for (int64_t part = 0; part < parts.count(); ++part) {
    // The kernel takes out and the logsumexp for contiguous.
    auto result = at::_efficient_attention_backward(
        parts.queries(grad_out, part).contiguous().unsqueeze(0),
        parts.queries(q, part).unsqueeze(0), parts.keys(k, part).unsqueeze(0),
        parts.keys(v, part).unsqueeze(0), /*bias=*/std::nullopt,
        parts.queries(out, part).contiguous().unsqueeze(0), call.queries.offsets, call.keys.offsets,
        call.queries.longest, call.keys.longest, parts.queries(padded, part).contiguous(),
        /*dropout_p=*/0.0, no_dropout_state, no_dropout_state, mask_type(call),
        /*bias_requires_grad=*/false, call.scale,
        /*num_splits_key=*/std::nullopt, call.window);
    grads_q.push_back(std::get<0>(result).squeeze(0));
    parts.add_keys(grads_k, std::get<1>(result).squeeze(0));
    parts.add_keys(grads_v, std::get<2>(result).squeeze(0));
  }
  const auto finish = [](const Tensor& grad, const Tensor& like) {
    return unpad_last_dim(grad, like.size(2)).to(like.scalar_type()).contiguous();
  };
  Tensor grad_q = finish(parts.join_queries(grads_q), call.q);
  if (call.may_lack_keys()) {  // the kernel leaves the gradients of queries without keys unwritten
    grad_q.masked_fill_(queries_without_keys(call).unsqueeze(1).unsqueeze(2), 0);
  }
  Tensor grad_k = finish(parts.join_keys(grads_k), call.k);
  Tensor grad_v = finish(parts.join_keys(grads_v), call.v);
  return with_zero_tails(call, {grad_q, grad_k, grad_v});
}

const RegisterBackend registered({"efficient", /*preference=*/50, takes, forward, backward, warn});

}  // namespace
}  // namespace cuseq::attention::efficient_backend
