#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "attention/backend.h"
#include "attention/flash_rows.h"
#include "attention/measured.h"
#include "attention/rows.h"
#include "cuseq/seqlens.h"

// PyTorch's flash attention. It is called through the dispatcher, so that FA3 or FA4 replaces it
// after torch.nn.attention.activate_flash_attention_impl.
namespace cuseq::attention::flash_backend {
namespace {

bool takes(const Call& call, std::string* why) {
  if (!call.q.is_cuda()) return refuse(why, "it runs on CUDA, got a tensor on the CPU");
  const int64_t sm = capability_of(call.q);
  if (sm < 80) return refuse(why, "it runs on GPUs from sm_80 on, got sm_", sm);
  return flash_takes(call, why);
}

// With a longest length of 1, flash-attention takes a decoding path that assumes a row without a
// tail.
int64_t longest_of(const Sequences& sequences) { return std::max<int64_t>(sequences.longest, 2); }

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::optional<Output> forward(const Call& call) {
  const int64_t head_dim = flash_head_dim(call);
  const FlashWindow window(call);
  auto result = at::_flash_attention_forward(
      flash_rows(call.q, head_dim), flash_rows(call.k, head_dim), flash_rows(call.v, head_dim),
      call.queries.offsets, call.keys.offsets, longest_of(call.queries), longest_of(call.keys),
      /*dropout_p=*/0.0, call.causal, /*return_debug_mask=*/false, call.scale, window.left,
      window.right);
  Tensor out = unpad_last_dim(std::get<0>(result), call.v.size(2));
  Tensor logsumexp = std::get<1>(result);
  // flash-attention's logsumexp of a query without keys is inf.
  if (call.may_lack_keys()) logsumexp.masked_fill_(logsumexp.eq(kInfinity), -kInfinity);
  zero_tail({out, logsumexp.t()}, call.queries);
  return Output{out, logsumexp};
}

// Run the backward kernel once. The rows must be prepared by flash_rows.
Gradients backward_once(const Call& call, const Outer& outer) {
  const FlashWindow window(call);
  const Tensor no_dropout_state = at::empty({2}, call.q.options().dtype(at::kLong));
  return at::_flash_attention_backward(
      outer.grad_out, call.q, call.k, call.v, outer.out, outer.logsumexp, call.queries.offsets,
      call.keys.offsets, longest_of(call.queries), longest_of(call.keys), /*dropout_p=*/0.0,
      call.causal, no_dropout_state, no_dropout_state, call.scale, window.left, window.right);
}

// flash-attention 2 indexes its backward workspace of (tokens + 128 * n_seqs) x heads x head_dim
// with 32 bits (unsloth#8957). Heads are independent, so each call gets as many as fit.
int64_t heads_per_backward(const Call& call) {
  const int64_t own = call.q.size(2);
  const int64_t head_dim = own <= 192 ? round_up(own, 32) : 256;
  const int64_t per_head = (call.q.size(0) + 128 * (call.queries.count() + 1)) * head_dim;
  const int64_t heads = std::numeric_limits<int32_t>::max() / per_head;
  TORCH_CHECK(heads >= 1,
              "flash attention's backward indexes (tokens + 128 * n_seqs) * head_dim "
              "with 32 bits, and this pack needs ",
              per_head, ": use shorter rows, or fewer sequences per row");
  return heads;
}

Gradients backward_by_heads(const Call& call, const Outer& outer, int64_t heads_per_call) {
  const int64_t key_heads = call.k.size(1);
  const int64_t group = call.q.size(1) / key_heads;
  Tensor grad_q = at::empty(call.q.sizes(), call.q.options());
  Tensor grad_k = at::zeros(call.k.sizes(), call.k.options());
  Tensor grad_v = at::zeros(call.v.sizes(), call.v.options());
  // Use whole groups of query heads if they fit, else parts of one group, whose key gradients are
  // added up.
  const int64_t key_step = std::max<int64_t>(1, heads_per_call / group);
  const int64_t query_step = heads_per_call >= group ? key_step * group : heads_per_call;
  const auto heads = [](const Tensor& tensor, int64_t first, int64_t count) {
    return tensor.narrow(1, first, count);
  };
  for (int64_t k = 0; k < key_heads; k += key_step) {
    const int64_t keys = std::min(key_step, key_heads - k);
    const int64_t end = (k + keys) * group;
    for (int64_t q = k * group; q < end; q += query_step) {
      const int64_t queries = std::min(query_step, end - q);
      Call part = call;
      part.q = heads(call.q, q, queries);
      part.k = heads(call.k, k, keys);
      part.v = heads(call.v, k, keys);
      auto [dq, dk, dv] =
          backward_once(part, {heads(outer.grad_out, q, queries), heads(outer.out, q, queries),
                               outer.logsumexp.narrow(0, q, queries).contiguous()});
      heads(grad_q, q, queries).copy_(dq);
      heads(grad_k, k, keys).add_(dk);
      heads(grad_v, k, keys).add_(dv);
    }
  }
  return {grad_q, grad_k, grad_v};
}

std::optional<Gradients> backward(const Call& call, const Outer& outer) {
  const int64_t head_dim = flash_head_dim(call);
  Call padded = call;
  padded.q = flash_rows(call.q, head_dim);
  padded.k = flash_rows(call.k, head_dim);
  padded.v = flash_rows(call.v, head_dim);
  const Tensor logsumexp =
      call.may_lack_keys() ? outer.logsumexp.masked_fill(outer.logsumexp.eq(-kInfinity), kInfinity)
                           : outer.logsumexp;
  const Outer padded_outer{flash_rows(outer.grad_out.contiguous(), head_dim),
                           flash_rows(outer.out, head_dim), logsumexp.contiguous()};
  const int64_t heads_per_call = heads_per_backward(padded);
  auto [grad_q, grad_k, grad_v] = heads_per_call >= call.q.size(1)
                                      ? backward_once(padded, padded_outer)
                                      : backward_by_heads(padded, padded_outer, heads_per_call);
  grad_q = unpad_last_dim(grad_q, call.q.size(2));
  grad_k = unpad_last_dim(grad_k, call.k.size(2));
  grad_v = unpad_last_dim(grad_v, call.v.size(2));
  return with_zero_tails(call, {grad_q, grad_k, grad_v});
}

const RegisterBackend registered({"flash", /*preference=*/100, takes, forward, backward});

}  // namespace
}  // namespace cuseq::attention::flash_backend
