#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "attention/backend.h"
#include "attention/rows.h"
#include "cuseq/cache.h"
#include "ops/checks.h"
#include "ops/dtype_name.h"
#include "ops/mask_options.h"

#ifdef CUSEQ_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

// Exact attention, one segment at a time, with PyTorch's dense kernels. The work is the sum of the
// squared lengths, or with a window the sum of length times window. Masks are built for one run of
// queries at a time. Used on the CPU, and for CUDA inputs that no varlen kernel takes.
namespace cuseq::attention::segments_backend {
namespace {

// Queries [query_begin, query_end) see only keys in [key_begin, key_end). Both are tokens of their
// rows; the mask rule's tokens are those plus a shift.
struct Tile {
  int64_t query_begin;
  int64_t query_end;
  int64_t key_begin;
  int64_t key_end;
  int64_t query_shift;
  int64_t key_shift;
  bool masked;  // needs a mask; if not, sees all keys or their causal half

  int64_t queries() const { return query_end - query_begin; }
  int64_t keys() const { return key_end - key_begin; }
};

// Raise unless a part of a row's offsets, on the host, ascends inside the row.
void check_offsets_inside(const Tensor& offsets, int64_t total_tokens) {
  const int64_t first = offsets.const_data_ptr<int32_t>()[0];
  TORCH_CHECK_VALUE(0 <= first && first <= total_tokens, "offsets must lie in [0, ", total_tokens,
                    "], got ", first);
  check_offset_values(offsets.sub(first), total_tokens - first);
}

// Return the offsets on the host, checked. Those of a layout are copied at most once and then
// cached; others are copied in each call. A copy synchronises.
Tensor offsets_on_host(const Sequences& sequences, int64_t total_tokens) {
  const Tensor& offsets = sequences.offsets;
  if (offsets.is_cpu()) return offsets;
  TORCH_CHECK(!is_capturing(offsets),
              "varlen_attention with these inputs runs sequence by sequence and needs offsets on "
              "the host, which a CUDA graph capture cannot copy: use fp16 or bf16, without spans");
  const int64_t size = sequences.count() + 1;
  Tensor host;
  if (sequences.num_real_tokens.has_value()) {
    const Tensor whole = cached_on_host(sequences.cu_seqlens);
    TORCH_CHECK_VALUE(whole.size(0) >= sequences.first + size,
                      "host_meta must be of the layout of cu_seqlens: it says n_seqs = ",
                      sequences.count(), ", but there are ", whole.size(0), " offsets");
    host = whole.narrow(0, sequences.first, size);
  } else {
    host = offsets.cpu();
  }
  // host_meta does not say where sequences lie, so a caller may have passed it with other offsets,
  // which may hold any values.
  if (sequences.cu_seqlens.size(0) == size) {
    check_offset_values(host, total_tokens);
  } else {
    check_offsets_inside(host, total_tokens);
  }
  return host;
}

// A sequence: its queries and keys, and the shifts of both to tokens of the mask rule.
struct Pair {
  int64_t query_begin;
  int64_t query_end;
  int64_t key_begin;
  int64_t key_end;
  int64_t query_shift = 0;
  int64_t key_shift = 0;
  int64_t segment = 0;  // of the mask rule

  int64_t queries() const { return query_end - query_begin; }
  int64_t keys() const { return key_end - key_begin; }
};

// The mask rule on the inputs' device and on the host. The rule's tokens are those of the row; with
// queries and keys in two rows they are those of one endless sequence, on which the last query and
// the last key of a pair are the same token.
struct Rules {
  Tensor device_offsets;  // these own the memory that `device` and `host` point to
  Tensor host_offsets;
  Tensor query_offsets;
  Tensor key_offsets;
  MaskRule device;
  MaskRule host;
  bool of_one_row;
  // Spans known only on the device are not copied, since that would synchronise. Then any segment
  // is assumed to have a span, and any query to see all of its segment.
  OptionalTensor host_spans;
  bool spans_are_known = true;
  bool cuts_all = false;  // into runs, since all scores of a tile are in memory at once

  explicit Rules(const Call& call)
      : query_offsets(offsets_on_host(call.queries, call.q.size(0))),
        of_one_row(call.is_of_one_row()) {
    key_offsets = of_one_row ? query_offsets : offsets_on_host(call.keys, call.k.size(0));
    constexpr int64_t kEndless = std::numeric_limits<int32_t>::max();
    const auto endless = [](const Tensor& like) {
      return at::arange(2, like.options()).mul_(kEndless);
    };
    device_offsets = of_one_row ? call.queries.offsets : endless(call.queries.offsets);
    host_offsets = of_one_row ? query_offsets : endless(query_offsets);
    device.segments.seqlens = {device_offsets.const_data_ptr<int32_t>(),
                               device_offsets.size(0) - 1};
    device.segments.total_tokens = of_one_row ? call.q.size(0) : kEndless;
    device.causal = call.causal;
    device.window = call.window.value_or(0);
    cuts_all = call.softcap.has_value();
    host = device;
    host.segments.seqlens.cu_seqlens = host_offsets.const_data_ptr<int32_t>();
    if (call.spans.has_value()) {
      device.spans = call.spans->const_data_ptr<int32_t>();
      device.n_spans = call.spans->size(0);
      host_spans = remembered_on_host(*call.spans);
      spans_are_known = host_spans.has_value();
      if (spans_are_known) {
        host.spans = host_spans->const_data_ptr<int32_t>();
        host.n_spans = host_spans->size(0);
      }
    }
  }

  int64_t count() const { return query_offsets.size(0) - 1; }

  // Return sequence i, without the queries that see no key.
  Pair pair(int64_t i) const {
    const auto* queries = query_offsets.const_data_ptr<int32_t>();
    const auto* keys = key_offsets.const_data_ptr<int32_t>();
    Pair pair{queries[i], queries[i + 1], keys[i], keys[i + 1]};
    if (of_one_row) {
      pair.segment = i;
      return pair;
    }
    const int64_t surplus = pair.queries() - pair.keys();  // of queries
    pair.query_shift = std::max<int64_t>(0, -surplus) - pair.query_begin;
    pair.key_shift = std::max<int64_t>(0, surplus) - pair.key_begin;
    int64_t blind = 0;
    if (host.causal) {
      blind = surplus;
    } else if (host.window > 0) {
      blind = surplus + 1 - host.window;
    }
    pair.query_begin += std::clamp<int64_t>(blind, 0, pair.queries());
    return pair;
  }

  // Return the keys of the queries [first, last) of a pair. The bounds of keys ascend with the
  // queries, so the first and the last query determine them.
  KeyRange keys_of(int64_t first, int64_t last, const Pair& pair) const {
    if (!spans_are_known) return {pair.key_begin, pair.key_end};
    const auto of = [&](int64_t query) {
      return host.keys_of(query + pair.query_shift, pair.segment);
    };
    return {std::max(of(first).first - pair.key_shift, pair.key_begin),
            std::min(of(last - 1).end - pair.key_shift, pair.key_end)};
  }

  // Return whether a span may start in the pair.
  bool has_span(const Pair& pair) const {
    if (!spans_are_known) return true;
    const int64_t last = host.span_before(pair.query_end - 1);
    return last >= 0 && host.spans[2 * last] >= pair.query_begin;
  }
};

// Call `visit` for each tile. A sequence is one tile, unless a window, spans or keys before the
// first query need a mask, or a soft cap needs the scores: then it is cut into runs of queries,
// each with the keys within its reach.
template <typename F>
void for_each_tile(const Rules& rules, const F& visit) {
  const MaskRule& rule = rules.host;
  for (int64_t i = 0; i < rules.count(); ++i) {
    const Pair pair = rules.pair(i);
    if (pair.queries() == 0 || pair.keys() == 0) continue;
    const auto visit_run = [&](int64_t first, int64_t last, KeyRange keys, bool masked) {
      visit(Tile{first, last, keys.first, keys.end, pair.query_shift, pair.key_shift, masked});
    };
    const bool windowed = rule.window > 0 && rule.window < std::max(pair.queries(), pair.keys());
    const bool is_square = pair.query_begin + pair.query_shift == pair.key_begin + pair.key_shift;
    if (!windowed && !rules.cuts_all && (!rule.causal || is_square) && !rules.has_span(pair)) {
      visit_run(pair.query_begin, pair.query_end, {pair.key_begin, pair.key_end}, false);
      continue;
    }
    constexpr int64_t kShortestRun = 128;
    constexpr int64_t kRun = 1024;
    const int64_t run = windowed ? std::max(kShortestRun, rule.window) : kRun;
    for (int64_t first = pair.query_begin; first < pair.query_end; first += run) {
      const int64_t last = std::min(first + run, pair.query_end);
      visit_run(first, last, rules.keys_of(first, last, pair), true);
    }
  }
}

// The attention of one tile, with one of PyTorch's dense kernels. q, k and v are [batch, heads,
// tokens, dim], where batch * heads is the number of query heads.
class TileAttention {
 public:
  TileAttention(const Tile& tile, const MaskRule& rule, const Call& call, const Tensor& q)
      : causal_(call.causal && !tile.masked),
        scale_(call.scale),
        softcap_(call.softcap),
        kernel_(softcap_.has_value() ? Kernel::kPlain : kernel_for(q)) {
    // The plain kernel has no causal option.
    if (tile.masked || (causal_ && kernel_ == Kernel::kPlain)) {
      mask_ = mask_of_tile(rule, tile.query_begin + tile.query_shift, tile.queries(),
                           tile.key_begin + tile.key_shift, tile.keys(), q);
    }
  }

  std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v) const {
    switch (kernel_) {
      case Kernel::kCpu:
        return at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0.0, causal_,
                                                               mask_, scale_);
      case Kernel::kEfficient: {
        const auto result = at::_scaled_dot_product_efficient_attention(
            q, k, v, mask_for_heads(q), /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, causal_,
            scale_);
        return {std::get<0>(result), std::get<1>(result).narrow(2, 0, q.size(2))};
      }
      case Kernel::kPlain:
        break;
    }
    const Tensor scores = masked(capped(scores_of(q, k)));
    const Tensor logsumexp = scores.logsumexp(-1);
    return {at::matmul(scores.sub_(logsumexp.unsqueeze(-1)).exp_(), wide(v)), logsumexp};
  }

  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& q,
                                              const Tensor& k, const Tensor& v, const Tensor& out,
                                              const Tensor& logsumexp) const {
    switch (kernel_) {
      case Kernel::kCpu:
        return at::_scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, logsumexp, /*dropout_p=*/0.0, causal_, mask_, scale_);
      case Kernel::kEfficient: {
        // The kernel reads whole groups of 32 rows. Padding with infinity makes the extra rows
        // contribute zero.
        const int64_t rest = (32 - logsumexp.size(2) % 32) % 32;
        const Tensor padded =
            at::constant_pad_nd(logsumexp, {0, rest}, std::numeric_limits<double>::infinity());
        const Tensor no_dropout_state = at::empty({}, q.options().dtype(at::kLong));
        const auto result = at::_scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, mask_for_heads(q).value_or(Tensor()), out, padded.contiguous(),
            no_dropout_state, no_dropout_state, /*dropout_p=*/0.0, {true, true, true, false},
            causal_, scale_);
        return {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
      }
      case Kernel::kPlain:
        break;
    }
    const Tensor grad = wide(grad_out);
    const Tensor scores = capped(scores_of(q, k));
    const Tensor weights = masked(scores.clone()).sub_(logsumexp.unsqueeze(-1)).exp_();
    const Tensor delta = grad.mul(wide(out)).sum(-1, /*keepdim=*/true);
    const Tensor grad_scores =
        at::matmul(grad, wide(v).transpose(-2, -1)).sub_(delta).mul_(weights).mul_(scale_);
    if (softcap_.has_value()) {  // the derivative of c * tanh(s / c) is 1 - tanh^2
      grad_scores.mul_(scores.div_(*softcap_).square_().neg_().add_(1));
    }
    return {at::matmul(grad_scores, wide(k)), at::matmul(grad_scores.transpose(-2, -1), wide(q)),
            at::matmul(weights.transpose(-2, -1), grad)};
  }

  // PyTorch's memory-efficient kernel does not support fp64, and supports bf16 from sm_80 on.
  static bool is_efficient([[maybe_unused]] const Tensor& q) {
#ifdef CUSEQ_WITH_CUDA
    return q.is_cuda() && q.scalar_type() != at::kDouble &&
           (q.scalar_type() != at::kBFloat16 || at::cuda::getCurrentDeviceProperties()->major >= 8);
#else
    return false;
#endif
  }

 private:
  enum class Kernel { kCpu, kEfficient, kPlain };

  static Kernel kernel_for(const Tensor& q) {
    if (q.is_cpu()) return Kernel::kCpu;
    return is_efficient(q) ? Kernel::kEfficient : Kernel::kPlain;
  }

  OptionalTensor mask_for_heads(const Tensor& q) const {
    if (!mask_.has_value()) return std::nullopt;
    return mask_->expand({q.size(0), q.size(1), -1, -1});
  }

  // Scores of fp16 or bf16 would have too few digits.
  static Tensor wide(const Tensor& tensor) {
    return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
  }

  Tensor scores_of(const Tensor& q, const Tensor& k) const {
    return at::matmul(wide(q), wide(k).transpose(-2, -1)).mul_(scale_);
  }

  Tensor capped(Tensor scores) const {
    return softcap_.has_value() ? scores.div_(*softcap_).tanh_().mul_(*softcap_) : scores;
  }

  Tensor masked(Tensor scores) const { return mask_.has_value() ? scores.add_(*mask_) : scores; }

  bool causal_;
  double scale_;
  OptionalDouble softcap_;
  Kernel kernel_;
  OptionalTensor mask_;  // additive, [1, 1, queries, keys]
};

// Return how many batches the heads are seen as. On the CPU each key head is a batch, so that the
// query heads of a group share it through a stride of zero, and keys and values are not repeated.
int64_t batches_of(const Call& call) { return call.q.is_cpu() ? call.k.size(1) : 1; }

// Return a [batch, heads / batch, tokens, dim] view of rows [tokens, heads, dim].
Tensor to_bhsd(const Tensor& rows, int64_t begin, int64_t end, int64_t batch) {
  return rows.narrow(0, begin, end - begin).transpose(0, 1).unflatten(0, {batch, -1});
}

// Give key and value heads to the query heads that share them: a view if each is a batch, else a
// copy.
Tensor expand_heads(const Tensor& bhsd, int64_t heads) {
  const int64_t group = heads / (bhsd.size(0) * bhsd.size(1));
  if (group == 1) return bhsd;
  return bhsd.unsqueeze(2).expand({-1, -1, group, -1, -1}).flatten(1, 2);
}

// Apply the transpose of to_bhsd followed by expand_heads: sum the heads of each group and return
// [tokens, heads, dim].
Tensor reduce_heads(const Tensor& bhsd, int64_t heads) {
  const Tensor flat = bhsd.flatten(0, 1);
  const int64_t group = flat.size(0) / heads;
  const Tensor reduced = group == 1 ? flat : flat.unflatten(0, {heads, group}).sum(1);
  return reduced.transpose(0, 1);
}

// Return a head_dim for q, k and v that the kernels accept.
int64_t common_head_dim(const Tensor& query, const Tensor& value) {
  const int64_t longest = std::max(query.size(2), value.size(2));
  return TileAttention::is_efficient(query) ? round_up(longest, 8) : longest;
}

Tensor prepared(const Tensor& rows, int64_t head_dim) {
  const Tensor padded = pad_last_dim(rows, head_dim);
  return TileAttention::is_efficient(rows) ? aligned_rows(padded) : padded;
}

bool takes(const Call& call, std::string* why) {
  return call.is_of_one_row() || !call.spans.has_value() ||
         refuse(why, "its spans are of a row of queries and keys");
}

void warn(const Call& call) {
  if (call.q.is_cpu() || call.extra() != nullptr) return;
  const bool two_sided_window = call.window.has_value() && !call.causal;
  TORCH_WARN_ONCE("cuseq.varlen_attention: no varlen kernel takes ",
                  dtype_name(call.q.scalar_type()),
                  two_sided_window ? " with a two-sided window" : "",
                  " here, so sequences run one by one, and offsets that only the device knows "
                  "are copied to the host once, a synchronisation");
}

std::optional<Output> forward(const Call& call) {
  const int64_t heads = call.q.size(1);
  const int64_t value_dim = call.v.size(2);
  const int64_t head_dim = common_head_dim(call.q, call.v);
  const Rules rules(call);
  const Tensor q = prepared(call.q, head_dim);
  const Tensor k = prepared(call.k, head_dim);
  const Tensor v = prepared(call.v, head_dim);
  Tensor out = at::zeros({q.size(0), heads, value_dim}, q.options());
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor logsumexp = at::full({heads, q.size(0)}, -std::numeric_limits<double>::infinity(),
                              q.options().dtype(lse_type));
  zero_tail({logsumexp.t()}, call.queries);
  const int64_t batch = batches_of(call);
  for_each_tile(rules, [&](const Tile& tile) {
    const auto [tile_out, tile_lse] =
        TileAttention(tile, rules.device, call, q)
            .forward(to_bhsd(q, tile.query_begin, tile.query_end, batch),
                     expand_heads(to_bhsd(k, tile.key_begin, tile.key_end, batch), heads),
                     expand_heads(to_bhsd(v, tile.key_begin, tile.key_end, batch), heads));
    to_bhsd(out, tile.query_begin, tile.query_end, batch).copy_(tile_out.narrow(3, 0, value_dim));
    logsumexp.narrow(1, tile.query_begin, tile.queries()).copy_(tile_lse.flatten(0, 1));
  });
  return Output{out, logsumexp};
}

std::optional<Gradients> backward(const Call& call, const Outer& outer) {
  const int64_t heads = call.q.size(1);
  const int64_t key_heads = call.k.size(1);
  const int64_t head_dim = common_head_dim(call.q, call.v);
  const Rules rules(call);
  const Tensor q = prepared(call.q, head_dim);
  const Tensor k = prepared(call.k, head_dim);
  const Tensor v = prepared(call.v, head_dim);
  const Tensor o = prepared(outer.out, head_dim);
  const Tensor grad_o = prepared(outer.grad_out.contiguous(), head_dim);
  Tensor grad_q = at::zeros(call.q.sizes(), call.q.options());
  Tensor grad_k = at::zeros(call.k.sizes(), call.k.options());
  Tensor grad_v = at::zeros(call.v.sizes(), call.v.options());
  const int64_t batch = batches_of(call);
  for_each_tile(rules, [&](const Tile& tile) {
    const auto [tile_q, tile_k, tile_v] =
        TileAttention(tile, rules.device, call, q)
            .backward(to_bhsd(grad_o, tile.query_begin, tile.query_end, batch),
                      to_bhsd(q, tile.query_begin, tile.query_end, batch),
                      expand_heads(to_bhsd(k, tile.key_begin, tile.key_end, batch), heads),
                      expand_heads(to_bhsd(v, tile.key_begin, tile.key_end, batch), heads),
                      to_bhsd(o, tile.query_begin, tile.query_end, batch),
                      outer.logsumexp.narrow(1, tile.query_begin, tile.queries())
                          .unflatten(0, {batch, -1}));
    grad_q.narrow(0, tile.query_begin, tile.queries())
        .copy_(reduce_heads(tile_q, heads).narrow(2, 0, call.q.size(2)));
    // Keys of overlapping windows get gradients from several tiles.
    grad_k.narrow(0, tile.key_begin, tile.keys())
        .add_(reduce_heads(tile_k, key_heads).narrow(2, 0, call.k.size(2)));
    grad_v.narrow(0, tile.key_begin, tile.keys())
        .add_(reduce_heads(tile_v, key_heads).narrow(2, 0, call.v.size(2)));
  });
  return Gradients{grad_q, grad_k, grad_v};
}

const RegisterBackend registered({"segments", /*preference=*/0, takes, forward, backward, warn});

}  // namespace
}  // namespace cuseq::attention::segments_backend
