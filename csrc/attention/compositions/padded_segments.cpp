#include <ATen/ops/stack.h>

#include <vector>

#include "attention/composition.h"
#include "cuseq/cache.h"
#include "cuseq/ops.h"

// A row with padded segments: gather, attend, scatter. The real tokens are gathered into a row
// without padding, so that padding costs no attention. Outputs and gradients of padding are zero.
namespace cuseq::attention::compositions::padded_segments {
namespace {

struct RealTokens {
  Tensor places;  // index in the row of each real token
  Tensor ranks;   // index among the real tokens of each token, -1 on padding
  int64_t total_tokens;

  explicit RealTokens(const Row& row) : total_tokens(row.call.q.size(0)) {
    const Sequences& sequences = row.call.queries;
    const Tensor& padded = *row.cu_seqlens_padded;
    // Sections of a rank's rows are new tensors in each call, which the cache has never seen.
    const bool are_sections = sequences.cu_seqlens.sizes() != padded.sizes();
    const auto rows = are_sections
                          ? segment_rows(sequences.offsets, padded, total_tokens)
                          : cached_segment_rows(sequences.cu_seqlens, padded, total_tokens);
    const int64_t real = sequences.num_real_tokens.value_or(total_tokens);
    places = std::get<0>(rows).narrow(0, 0, real);
    ranks = std::get<1>(rows);
  }

  std::vector<Tensor> gathered(TensorList tensors) const {
    return gather_rows(tensors, places, ranks, {places.size(0)}, 1,
                       std::vector<at::Scalar>(tensors.size(), 0));
  }

  std::vector<Tensor> scattered(TensorList tensors) const {
    return gather_rows(tensors, ranks, places, {total_tokens}, 1,
                       std::vector<at::Scalar>(tensors.size(), 0));
  }

  // Return the row of the real tokens, given their q, k and v.
  Row row_of(const Row& row, const Tensor& q, const Tensor& k, const Tensor& v) const {
    Row real = row;
    real.cu_seqlens_padded.reset();
    Call& call = real.call;
    call.q = q;
    call.k = k;
    call.v = v;
    if (call.spans.has_value()) {
      // Spans on a device are unchecked and may hold any values.
      const Tensor inside = call.spans->to(at::kLong).clamp(0, total_tokens);
      const Tensor begins = ranks.index({inside.select(1, 0).clamp_max(total_tokens - 1)});
      const Tensor lasts = ranks.index({inside.select(1, 1).sub(1).clamp_min(0)});
      call.spans = at::stack({begins, lasts.add(1)}, 1);
    }
    return real;
  }
};

// Ulysses gathers the whole row first.
bool fits(const Row& row) {
  return row.cu_seqlens_padded.has_value() && !(row.share.has_value() && row.share->is_ulysses());
}

Output forward(const Row& row) {
  const RealTokens tokens(row);
  const auto real = tokens.gathered({row.call.q, row.call.k, row.call.v});
  const auto [out, logsumexp] = attend(tokens.row_of(row, real[0], real[1], real[2]));
  const auto all = tokens.scattered({out, logsumexp.t().contiguous()});
  return {all[0], all[1].t().contiguous()};
}

Gradients backward(const Row& row, const Outer& outer) {
  const RealTokens tokens(row);
  const auto real = tokens.gathered({outer.grad_out.contiguous(), row.call.q, row.call.k,
                                     row.call.v, outer.out, outer.logsumexp.t().contiguous()});
  const auto [grad_q, grad_k, grad_v] = attend_backward(
      tokens.row_of(row, real[1], real[2], real[3]), {real[0], real[4], real[5].t().contiguous()});
  const auto all = tokens.scattered({grad_q, grad_k, grad_v});
  return {all[0], all[1], all[2]};
}

const RegisterComposition registered({"padded_segments", fits, forward, backward});

}  // namespace
}  // namespace cuseq::attention::compositions::padded_segments
