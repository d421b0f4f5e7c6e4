#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "ops/varlen_attention.h"

// Exact attention one segment at a time, with PyTorch's own dense kernels. Work is the sum of the
// squared lengths; with a window, of length times window. Nothing of size tokens x tokens is made.
namespace cuseq {
namespace {

using at::Tensor;

// Queries [query_begin, query_end) see keys of [key_begin, key_end) only.
struct Tile {
  int64_t query_begin;
  int64_t query_end;
  int64_t key_begin;
  int64_t key_end;
  bool windowed;  // then a mask says which of the keys

  int64_t queries() const { return query_end - query_begin; }
  int64_t keys() const { return key_end - key_begin; }
};

// Without a window a segment is one tile. With one it is cut into runs of queries about as long as
// the window, each with the few keys in its reach.
template <typename F>
void for_each_tile(const Tensor& host_offsets, const AttentionPlan& plan, const F& visit) {
  const int32_t* offsets = host_offsets.const_data_ptr<int32_t>();
  for (int64_t segment = 0; segment < plan.n_seqs; ++segment) {
    const int64_t begin = offsets[segment];
    const int64_t end = offsets[segment + 1];
    if (begin == end) continue;
    if (!plan.window.has_value() || *plan.window >= end - begin) {
      visit(Tile{begin, end, begin, end, false});
      continue;
    }
    constexpr int64_t kShortestRun = 128;
    const int64_t reach = *plan.window - 1;
    const int64_t run = std::max(kShortestRun, *plan.window);
    for (int64_t first = begin; first < end; first += run) {
      const int64_t last = std::min(first + run, end);
      visit(Tile{first, last, std::max(begin, first - reach),
                 plan.causal ? last : std::min(end, last + reach), true});
    }
  }
}

// Additive, -inf where the query does not see the key; undefined where all or the causal half is.
Tensor mask_of(const Tile& tile, const AttentionPlan& plan, const Tensor& like, bool spell_causal) {
  if (!tile.windowed && !(spell_causal && plan.causal)) return {};
  const auto options = like.options().dtype(at::kLong);
  const Tensor queries = at::arange(tile.query_begin, tile.query_end, options).unsqueeze(1);
  const Tensor keys = at::arange(tile.key_begin, tile.key_end, options).unsqueeze(0);
  const Tensor distance = queries.sub(keys);
  Tensor hidden = plan.causal ? distance.lt(0) : distance.abs().ge(*plan.window);
  if (plan.causal && tile.windowed) hidden.logical_or_(distance.ge(*plan.window));
  return at::zeros({tile.queries(), tile.keys()}, like.options())
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
}

// [tokens, heads, dim] to [1, heads, tokens, dim], a view.
Tensor to_bhsd(const Tensor& rows, int64_t begin, int64_t end) {
  return rows.narrow(0, begin, end - begin).transpose(0, 1).unsqueeze(0);
}

// Key and value heads repeated for the query heads that share them.
Tensor expand_heads(const Tensor& bhsd, int64_t heads) {
  const int64_t group = heads / bhsd.size(1);
  if (group == 1) return bhsd;
  return bhsd.unsqueeze(2).expand({-1, -1, group, -1, -1}).flatten(1, 2);
}

// The transpose of expand_heads followed by to_bhsd: sums groups, returns [tokens, heads, dim].
Tensor reduce_heads(const Tensor& bhsd, int64_t heads) {
  const int64_t group = bhsd.size(1) / heads;
  const Tensor reduced = group == 1 ? bhsd : bhsd.unflatten(1, {heads, group}).sum(2);
  return reduced.squeeze(0).transpose(0, 1);
}

std::optional<Tensor> optional(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

std::tuple<Tensor, Tensor> dense_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tile& tile, const AttentionPlan& plan) {
  if (q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, /*dropout_p=*/0.0, plan.causal && !tile.windowed,
        optional(mask_of(tile, plan, q, /*spell_causal=*/false)), plan.scale);
  }
  Tensor scores = at::matmul(q, k.transpose(-2, -1)).mul_(plan.scale);
  const Tensor mask = mask_of(tile, plan, q, /*spell_causal=*/true);
  if (mask.defined()) scores.add_(mask);
  const Tensor logsumexp = scores.logsumexp(-1);
  return {at::matmul(scores.sub_(logsumexp.unsqueeze(-1)).exp_(), v), logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> dense_backward(const Tensor& grad_out, const Tensor& q,
                                                  const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& logsumexp,
                                                  const Tile& tile, const AttentionPlan& plan) {
  if (q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, /*dropout_p=*/0.0, plan.causal && !tile.windowed,
        optional(mask_of(tile, plan, q, /*spell_causal=*/false)), plan.scale);
  }
  Tensor scores = at::matmul(q, k.transpose(-2, -1)).mul_(plan.scale);
  const Tensor mask = mask_of(tile, plan, q, /*spell_causal=*/true);
  if (mask.defined()) scores.add_(mask);
  const Tensor weights = scores.sub_(logsumexp.unsqueeze(-1)).exp_();
  const Tensor grad_weights = at::matmul(grad_out, v.transpose(-2, -1));
  const Tensor delta = grad_out.mul(out).sum(-1, /*keepdim=*/true);
  const Tensor grad_scores = grad_weights.sub(delta).mul_(weights).mul_(plan.scale);
  return {at::matmul(grad_scores, k), at::matmul(grad_scores.transpose(-2, -1), q),
          at::matmul(weights.transpose(-2, -1), grad_out)};
}

}  // namespace

AttentionOutput segmented_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& host_offsets, const AttentionPlan& plan) {
  const int64_t heads = query.size(1);
  const int64_t value_dim = value.size(2);
  const int64_t head_dim = std::max(query.size(2), value_dim);
  const Tensor q = pad_last_dim(query, head_dim);
  const Tensor k = pad_last_dim(key, head_dim);
  const Tensor v = pad_last_dim(value, head_dim);
  Tensor out = at::zeros({query.size(0), heads, value_dim}, query.options());
  const auto lse_type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor logsumexp = at::zeros({heads, query.size(0)}, query.options().dtype(lse_type));
  for_each_tile(host_offsets, plan, [&](const Tile& tile) {
    const auto [tile_out, tile_lse] =
        dense_forward(to_bhsd(q, tile.query_begin, tile.query_end),
                      expand_heads(to_bhsd(k, tile.key_begin, tile.key_end), heads),
                      expand_heads(to_bhsd(v, tile.key_begin, tile.key_end), heads), tile, plan);
    out.narrow(0, tile.query_begin, tile.queries())
        .copy_(tile_out.squeeze(0).transpose(0, 1).narrow(2, 0, value_dim));
    logsumexp.narrow(1, tile.query_begin, tile.queries()).copy_(tile_lse.squeeze(0));
  });
  return {out, logsumexp};
}

AttentionGradients segmented_attention_backward(const Tensor& grad_out, const Tensor& query,
                                                const Tensor& key, const Tensor& value,
                                                const Tensor& out, const Tensor& logsumexp,
                                                const Tensor& host_offsets,
                                                const AttentionPlan& plan) {
  const int64_t heads = query.size(1);
  const int64_t key_heads = key.size(1);
  const int64_t head_dim = std::max(query.size(2), value.size(2));
  const Tensor q = pad_last_dim(query, head_dim);
  const Tensor k = pad_last_dim(key, head_dim);
  const Tensor v = pad_last_dim(value, head_dim);
  const Tensor o = pad_last_dim(out, head_dim);
  const Tensor grad_o = pad_last_dim(grad_out.contiguous(), head_dim);
  Tensor grad_query = at::zeros(query.sizes(), query.options());
  Tensor grad_key = at::zeros(key.sizes(), key.options());
  Tensor grad_value = at::zeros(value.sizes(), value.options());
  for_each_tile(host_offsets, plan, [&](const Tile& tile) {
    const auto [grad_q, grad_k, grad_v] = dense_backward(
        to_bhsd(grad_o, tile.query_begin, tile.query_end),
        to_bhsd(q, tile.query_begin, tile.query_end),
        expand_heads(to_bhsd(k, tile.key_begin, tile.key_end), heads),
        expand_heads(to_bhsd(v, tile.key_begin, tile.key_end), heads),
        to_bhsd(o, tile.query_begin, tile.query_end),
        logsumexp.narrow(1, tile.query_begin, tile.queries()).unsqueeze(0), tile, plan);
    grad_query.narrow(0, tile.query_begin, tile.queries())
        .copy_(reduce_heads(grad_q, heads).narrow(2, 0, query.size(2)));
    // Windows overlap, so keys may collect from several tiles.
    grad_key.narrow(0, tile.key_begin, tile.keys())
        .add_(reduce_heads(grad_k, key_heads).narrow(2, 0, key.size(2)));
    grad_value.narrow(0, tile.key_begin, tile.keys())
        .add_(reduce_heads(grad_v, key_heads).narrow(2, 0, value.size(2)));
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace cuseq
