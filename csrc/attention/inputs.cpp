#include "attention/inputs.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "attention/capture_room.h"
#include "layout/host_meta.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/mask_options.h"
#include "ops/scan_lengths.h"

namespace cuseq::attention {
namespace {

void check_heads(const Tensor& tensor, const char* name, const Tensor& q) {
  TORCH_CHECK_VALUE(tensor.dim() == 3, name, " must have shape [tokens, heads, head_dim], got ",
                    tensor.sizes());
  TORCH_CHECK_VALUE(tensor.size(0) == q.size(0), name, " must have as many tokens as q, ",
                    q.size(0), ", got ", tensor.size(0));
  TORCH_CHECK_TYPE(tensor.is_floating_point() && tensor.scalar_type() == q.scalar_type(), name,
                   " must be floating point and of q's dtype, ", dtype_name(q.scalar_type()),
                   ", got ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, " must lie on q's device, ", q.device(),
                    ", got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.stride(2) == 1 || tensor.numel() == 0 || tensor.size(2) == 1, name,
                    " must be contiguous in its last dimension, got strides ", tensor.strides());
}

void check_tensors(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK_VALUE(q.dim() == 3, "q must have shape [tokens, heads, head_dim], got ", q.sizes());
  check_heads(q, "q", q);
  check_heads(k, "k", q);
  check_heads(v, "v", q);
  TORCH_CHECK_VALUE(k.size(1) == v.size(1), "k and v must have the same number of heads, got ",
                    k.size(1), " and ", v.size(1));
  TORCH_CHECK_VALUE(q.size(1) > 0, "q must have at least one head, got ", q.sizes());
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                    "q's number of heads must be a multiple of k's, got ", q.size(1), " and ",
                    k.size(1));
  TORCH_CHECK_VALUE(q.size(2) == k.size(2) && q.size(2) > 0 && v.size(2) > 0,
                    "q and k must have the same head_dim, at least 1, got ", q.size(2), " and ",
                    k.size(2), " (v has ", v.size(2), ")");
  check_tokens(q.size(0));
}

// Check the offsets and return the layout's host_meta, if any. Return none during a graph capture,
// because the graph will be replayed with other lengths.
std::optional<HostMeta> host_meta_of(const Tensor& q, const AttentionOptions& options) {
  const Tensor& cu_seqlens = options.cu_seqlens;
  check_offsets(cu_seqlens);
  TORCH_CHECK_VALUE(cu_seqlens.device() == q.device(), "packed must lie on q's device, ",
                    q.device(), ", got ", cu_seqlens.device(), ": move it with packed.to(device)");
  if (!options.host_meta.has_value() || is_capturing(q)) return std::nullopt;
  const HostMeta meta = HostMeta::of(*options.host_meta);
  TORCH_CHECK_VALUE(meta.total_tokens == q.size(0),
                    "q must have packed.total_tokens = ", meta.total_tokens, " tokens, got ",
                    q.size(0));
  meta.check_offsets(cu_seqlens);
  return meta;
}

void check_options(const Tensor& q, const AttentionOptions& options, OptionalInt bound) {
  const Tensor& cu_seqlens = options.cu_seqlens;
  check_offset_values(cu_seqlens, q.size(0));
  check_padded_offsets(options.cu_seqlens_padded, cu_seqlens, q.size(0));
  check_window(options.window);
  TORCH_CHECK_VALUE(!bound.has_value() || *bound >= 1,
                    "max_seqlen_bound must be at least the longest length, and 1, got ",
                    bound.value_or(0));
  TORCH_CHECK_VALUE(
      !options.scale.has_value() || (std::isfinite(*options.scale) && *options.scale > 0),
      "scale must be a finite number above 0, got ", options.scale.value_or(0));
  const double softcap = options.softcap.value_or(1.0);
  TORCH_CHECK_VALUE(softcap >= 0x1p-100 && softcap <= 0x1p100,
                    "softcap must be None or from 2^-100 to 2^100, got ", softcap);
  if (!options.spans.has_value()) return;
  check_spans(*options.spans, cu_seqlens);
  if (!values_can_be_read(cu_seqlens) || options.rank_meta.has_value()) return;
  const auto segments = options.cu_seqlens_padded.has_value()
                            ? OptionalTensor(options.cu_seqlens_padded->cpu())
                            : std::nullopt;
  check_spans_and_rows(cu_seqlens.cpu(), segments, q.size(0), options.spans->cpu(),
                       /*row_length=*/std::nullopt);
}

// Return the rank's share of a plan, if the row is a rank's part; check the options that depend on
// it. Spans then count tokens of the whole row, so they are checked here.
std::optional<RankShare> share_of(const Tensor& q, const AttentionOptions& options) {
  TORCH_CHECK_VALUE(options.rank_rows.has_value() == options.rank_meta.has_value(),
                    "rank_rows and rank_meta must be given together, got ",
                    options.rank_rows.has_value() ? "rank_rows" : "rank_meta", " alone");
  if (!options.rank_meta.has_value()) return std::nullopt;
  const auto share = RankShare::of(*options.rank_rows, *options.rank_meta, options.rank_group, q);
  TORCH_CHECK(share.is_of_replays() || !is_capturing(q),
              "attention over a rank's part of a row can be captured in a CUDA graph by "
              "cuseq.GraphedStep alone, which gives the plans of all rows one size; capture the "
              "layers between");
  share.check_options(options.causal, options.window, options.spans.has_value());
  if (options.spans.has_value() && values_can_be_read(options.cu_seqlens)) {
    const int64_t row = share.at(RankMetaSlot::kCpSize) * share.at(RankMetaSlot::kRowTokens);
    const auto segments = options.cu_seqlens_padded.has_value()
                              ? OptionalTensor(share.segment_starts().cpu())
                              : std::nullopt;
    check_spans_and_rows(share.whole_queries().offsets.cpu(), segments, row, options.spans->cpu(),
                         /*row_length=*/std::nullopt);
  }
  return share;
}

// Return offsets clamped to the row, with lengths clamped to `longest`. Those of a layout are valid
// already; others may hold any values, and PyTorch's kernels would read out of bounds.
Tensor brought_inside(const Tensor& offsets, int64_t longest, int64_t total_tokens) {
  Tensor inside = at::empty_like(offsets);
  ScanLengthsArgs args;
  args.source = offsets.const_data_ptr();
  args.source_is_offsets = true;
  args.n_seqs = offsets.size(0) - 1;
  args.max_seqs = args.n_seqs;
  args.limit = total_tokens;
  args.longest = longest;
  args.cu_seqlens = inside.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(scan_lengths, offsets, args);
  return inside;
}

// Return the sequences with the numbers that the host knows, from host_meta or from offsets on the
// CPU. If only the device knows them, the numbers are bounds.
Sequences sequences_of(const Tensor& q, const AttentionOptions& options,
                       const std::optional<HostMeta>& meta, OptionalInt bound) {
  const Tensor& cu_seqlens = options.cu_seqlens;
  const int64_t total_tokens = q.size(0);
  Sequences sequences;
  sequences.cu_seqlens = cu_seqlens;
  sequences.offsets = cu_seqlens;
  if (meta.has_value()) {
    sequences.longest = meta->max_seqlen;
    sequences.num_real_tokens = meta->num_real_tokens;
    // cu_seqlens_static has room for more sequences than there are.
    if (meta->num_seqs + 1 < cu_seqlens.size(0)) {
      sequences.offsets = cu_seqlens.narrow(0, 0, meta->num_seqs + 1);
    }
  } else if (cu_seqlens.is_cpu()) {
    sequences.longest = total_tokens;
    sequences.num_real_tokens = cu_seqlens.const_data_ptr<int32_t>()[sequences.count()];
  } else {
    sequences.longest = std::min(bound.value_or(total_tokens), total_tokens);
    const Tensor used =
        is_capturing(q)
            ? cu_seqlens.narrow(0, 0, sequences_of_capture(cu_seqlens, options.host_meta) + 1)
            : cu_seqlens;
    sequences.offsets = brought_inside(used, sequences.longest, total_tokens);
  }
  return sequences;
}

}  // namespace

Row row_of(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  OptionalInt bound;
  if (options.max_seqlen_bound.has_value()) {
    bound = options.max_seqlen_bound->guard_int(__FILE__, __LINE__);
  }
  check_tensors(q, k, v);
  const std::optional<HostMeta> meta = host_meta_of(q, options);
  check_options(q, options, bound);
  Row row;
  row.cu_seqlens_padded = options.cu_seqlens_padded;
  TORCH_CHECK_VALUE(!options.rank_rows.has_value() || !options.tree_rows.has_value(),
                    "rank_rows and tree_rows must not be given together: a tree is not dealt to "
                    "ranks");
  row.share = share_of(q, options);
  Call& call = row.call;
  call.q = q;
  call.k = k;
  call.v = v;
  call.queries = sequences_of(q, options, meta, bound);
  // A share in the form of a graph has places for all tokens, outside of captures too.
  if (row.share.has_value() && row.share->is_of_replays()) call.queries.num_real_tokens.reset();
  call.keys = call.queries;
  call.causal = options.causal;
  call.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(2))));
  call.spans = options.spans;
  call.softcap = options.softcap;
  call.backend = options.backend;
  // A window at least as long as the longest sequence has no effect. The caller's bound does not
  // prove that, since lengths may exceed it.
  int64_t longest = call.queries.num_real_tokens.has_value() ? call.queries.longest : q.size(0);
  if (row.share.has_value()) longest = row.share->longest_keys();
  if (options.window.has_value() && *options.window < longest) call.window = options.window;
  row.tree = tree_calls_of(q, options, bound);
  return row;
}

std::array<int64_t, 2> far_rows_sizes(const Call& call) {
  return {call.k.size(0) / kTokensPerKeptRow, call.k.size(1) * (call.k.size(2) + call.v.size(2))};
}

void check_far_rows(const OptionalTensor& far_rows, const Row& row) {
  if (!row.share.has_value()) {
    TORCH_CHECK_VALUE(!far_rows.has_value(),
                      "far_rows must be None unless packed is a rank's part of a row, got shape ",
                      far_rows->sizes());
    return;
  }
  const Tensor& k = row.call.k;
  const auto sizes = far_rows_sizes(row.call);
  TORCH_CHECK_VALUE(
      far_rows.has_value(),
      "far_rows must be what varlen_attention returned for the rank's part, got None");
  TORCH_CHECK_VALUE(far_rows->sizes() == sizes && far_rows->scalar_type() == k.scalar_type() &&
                        far_rows->device() == k.device() && far_rows->is_contiguous(),
                    "far_rows must be what varlen_attention returned for the rank's part, "
                    "contiguous ",
                    dtype_name(k.scalar_type()), " ", at::IntArrayRef(sizes), " on ", k.device(),
                    ", got ", dtype_name(far_rows->scalar_type()), " ", far_rows->sizes(),
                    " with strides ", far_rows->strides(), " on ", far_rows->device());
}

Outer outer_of(const Tensor& grad_out, const Tensor& out, const Tensor& logsumexp, const Tensor& q,
               const Tensor& v) {
  const std::array<int64_t, 3> shape = {q.size(0), q.size(1), v.size(2)};
  const auto check = [&](const Tensor& tensor, const char* name, at::IntArrayRef sizes,
                         at::ScalarType dtype) {
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, " must have shape ", sizes, ", got ",
                      tensor.sizes());
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be of dtype ", dtype_name(dtype),
                     ", got ", dtype_name(tensor.scalar_type()));
    TORCH_CHECK_VALUE(tensor.device() == q.device(), name, " must lie on q's device, ", q.device(),
                      ", got ", tensor.device());
  };
  check(grad_out, "grad_out", shape, q.scalar_type());
  check(out, "out", shape, q.scalar_type());
  check(logsumexp, "logsumexp", {q.size(1), q.size(0)},
        q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return {grad_out, out.contiguous(), logsumexp};  // as a forward gives it
}

}  // namespace cuseq::attention
