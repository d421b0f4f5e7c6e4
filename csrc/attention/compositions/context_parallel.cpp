#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/searchsorted.h>

#include "attention/choice.h"
#include "attention/composition.h"
#include "attention/exchange.h"
#include "attention/merge.h"
#include "attention/side_stream.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/sum_rows.h"

// A rank's part of a row whose documents are dealt. The current stream attends over whole
// documents. Beside it, another stream exchanges the keys that cut pieces need, and attends over
// these pieces when their keys are all there. If the plan merges, because whole documents are too
// few to hide the exchange, cut pieces attend to their own keys meanwhile too, and afterwards to
// the keys before them, and the two results are merged. The pieces of cut documents are the first
// rows of a rank; the keys and values of a token travel as one row, and so do their gradients.
namespace cuseq::attention {
namespace {

// Widths of a row of keys and values.
struct Width {
  int64_t key;
  int64_t all;

  explicit Width(const Call& call)
      : key(call.k.size(1) * call.k.size(2)), all(key + call.v.size(1) * call.v.size(2)) {}

  Tensor empty(int64_t rows, const Tensor& like) const {
    return at::empty({rows, all}, like.options());
  }
  // Return views of the keys and values in rows [n, all].
  Tensor keys(const Tensor& rows, const Call& call) const {
    return rows.narrow(1, 0, key).unflatten(1, {call.k.size(1), call.k.size(2)});
  }
  Tensor values(const Tensor& rows, const Call& call) const {
    return rows.narrow(1, key, all - key).unflatten(1, {call.v.size(1), call.v.size(2)});
  }
};

class Part {
 public:
  explicit Part(const Row& row)
      : row_(row),
        share_(*row.share),
        width_(row.call),
        cut_tokens_(share_.at(RankMetaSlot::kNumCutTokens)),
        far_(share_.at(RankMetaSlot::kNumFarRows)) {}

  int64_t cut_tokens() const { return cut_tokens_; }
  // A window counts from the last key of a piece's call, so its call has all keys of the piece.
  bool merges() const { return share_.merges() && !row_.call.window.has_value(); }
  bool has_exchange() const { return share_.at(RankMetaSlot::kAnyFar) != 0; }

  // Start the exchange of keys and values, or use those that the forward kept. Every rank of the
  // plan takes part, or none.
  void send_keys(bool is_backward) {
    const Call& call = row_.call;
    if (share_.at(RankMetaSlot::kCpSize) > 1) {
      const auto row_bytes = width_.all * static_cast<int64_t>(call.k.element_size());
      group_.emplace(share_, call.k,
                     Agreement{is_backward, call.q.size(1), call.k.size(1), row_bytes});
    }
    if (cut_tokens_ == 0 && !has_exchange()) return;
    sources_ = width_.empty(cut_tokens_ + far_, call.k);
    const Tensor own = sources_.narrow(0, 0, cut_tokens_);
    width_.keys(own, call).copy_(call.k.narrow(0, 0, cut_tokens_));
    width_.values(own, call).copy_(call.v.narrow(0, 0, cut_tokens_));
    if (!has_exchange()) return;
    if (is_backward && share_.keeps_far()) {
      sources_.narrow(0, cut_tokens_, far_).copy_(kept_rows());
      return;
    }
    // A rank without cut pieces must refuse a backend as others do, before anything moves.
    backend_of(cut_call(sources_));
    arrival_ = group_->exchange(sources_.narrow(0, cut_tokens_, far_),
                                at::index_select(sources_, 0, share_.sent_sources()),
                                share_.received(), share_.sent());
  }

  // Return the call of the whole documents, over the rank's row.
  Call whole() const {
    Call call = row_.call;
    call.queries = share_.whole_queries();
    call.keys = call.queries;
    return call;
  }

  // Return the call of all pieces with their own keys, over the rank's row.
  Call own() const {
    Call call = row_.call;
    call.queries = share_.all_queries();
    call.keys = call.queries;
    return call;
  }

  // Return the call of the cut pieces with their own keys.
  Call own_cut() const {
    Call call = row_.call;
    call.q = call.q.narrow(0, 0, cut_tokens_);
    call.k = call.k.narrow(0, 0, cut_tokens_);
    call.v = call.v.narrow(0, 0, cut_tokens_);
    call.queries = share_.cut_queries();
    call.keys = call.queries;
    return call;
  }

  // Return the call of the cut pieces, with the keys before them if it merges, else with all their
  // keys; wait for them.
  Call cut() {
    arrival_.wait();
    const Tensor keys = share_.key_sources().narrow(0, 0, share_.num_cut_keys());
    if (merges() || !share_.merges()) return cut_call(at::index_select(sources_, 0, keys));
    const Tensor order = at::argsort(places_by_piece());
    Call call =
        cut_call(at::index_select(sources_, 0, share_.key_sources().index_select(0, order)));
    call.keys.offsets = call.keys.offsets.add(call.queries.offsets);
    call.keys.cu_seqlens = call.keys.offsets;
    call.keys.first = 0;
    call.keys.longest = share_.at(RankMetaSlot::kLongestKeys);
    call.keys.num_real_tokens = share_.at(RankMetaSlot::kNumKeyRows);
    return call;
  }

  void wait() { arrival_.wait(); }

  // Keep the far rows for the backward if there is room for them. They must have arrived.
  void keep_far_rows() {
    if (share_.keeps_far() && far_ > 0) kept_rows().copy_(sources_.narrow(0, cut_tokens_, far_));
  }

  // Start the return of the gradients of far rows, given those of the keys of `cut`, and of
  // `own_cut` if it merges.
  void send_gradients(const Gradients& cut, const Gradients& own) {
    key_grads_ = rows_of(cut);
    if (merges()) {
      key_grads_ = at::cat({key_grads_, rows_of(own)});
    } else if (share_.merges()) {
      key_grads_ = at::index_select(key_grads_, 0, places_by_piece());
    }
    returned_ = width_.empty(share_.at(RankMetaSlot::kNumSentRows), row_.call.k);
    if (!has_exchange()) return;
    arrival_ =
        group_->exchange(returned_, sums(cut_tokens_, far_), share_.sent(), share_.received());
  }

  // Return the gradients of the keys and values of the cut pieces, side by side.
  Tensor own_gradients() {
    arrival_.wait();
    return sums(0, cut_tokens_);
  }

  // Write what `own_gradients` returned.
  void write_gradients(const Tensor& own, const Tensor& grad_k, const Tensor& grad_v) const {
    grad_k.narrow(0, 0, cut_tokens_).copy_(width_.keys(own, row_.call));
    grad_v.narrow(0, 0, cut_tokens_).copy_(width_.values(own, row_.call));
  }

 private:
  Tensor kept_rows() const { return row_.far_rows->narrow(0, 0, far_); }

  // Return the call of the cut pieces, given the rows of their keys and values.
  Call cut_call(const Tensor& rows) const {
    Call call = row_.call;
    call.q = call.q.narrow(0, 0, cut_tokens_);
    call.k = width_.keys(rows, row_.call);
    call.v = width_.values(rows, row_.call);
    call.queries = share_.cut_queries();
    call.keys = share_.cut_keys();
    call.causal = call.causal && !merges();
    return call;
  }

  // Return the gradients of keys and values, side by side.
  static Tensor rows_of(const Gradients& gradients) {
    const auto& [grad_q, grad_k, grad_v] = gradients;
    return at::cat({grad_k.flatten(1), grad_v.flatten(1)}, 1);
  }

  // Return the place of each row of key_sources if each piece's own keys followed those before it.
  // Worked example, pieces of 2 and 1 tokens after 1 and 2 keys:
  //   rows  a0 b0 b1 | A0 A1 B0      by piece  a0 A0 A1 b0 b1 B0      places  0 3 4 | 1 2 5
  Tensor places_by_piece() const {
    const Tensor queries = share_.cut_queries().offsets;
    const Tensor before = share_.cut_keys().offsets;
    const auto moved = [](const Tensor& offsets, int64_t rows, const Tensor& others) {
      const Tensor row = at::arange(rows, offsets.options());
      const Tensor piece = at::searchsorted(offsets.narrow(0, 1, offsets.size(0) - 1), row,
                                            /*out_int32=*/false, /*right=*/true);
      return row.add(others.index_select(0, piece));
    };
    return at::cat({moved(before, share_.num_cut_keys(), queries),
                    moved(queries, cut_tokens_, before.narrow(0, 1, before.size(0) - 1))});
  }

  // Return the gradients of the sources [first, first + count), summed over their terms.
  Tensor sums(int64_t first, int64_t count) const {
    const Tensor offsets = share_.term_offsets(first, count);
    const Tensor terms = share_.terms();
    Tensor out = width_.empty(count, key_grads_);
    SumRowsArgs args;
    args.first = key_grads_.const_data_ptr();
    args.second = returned_.const_data_ptr();
    args.num_first = key_grads_.size(0);
    args.num_second = returned_.size(0);
    args.offsets = offsets.const_data_ptr<int32_t>();
    args.terms = terms.const_data_ptr<int32_t>();
    args.num_terms = terms.size(0);
    args.out = out.mutable_data_ptr();
    args.num_rows = count;
    args.elements = width_.all;
    args.type = float_type(out, "k");
    CUSEQ_RUN(sum_rows, out, args);
    return out;
  }

  const Row& row_;
  const RankShare& share_;
  Width width_;
  int64_t cut_tokens_;
  int64_t far_;
  Tensor sources_;    // [cut tokens + far, width]
  Tensor key_grads_;  // [key rows, width]
  Tensor returned_;   // [sent rows, width]
  std::optional<Group> group_;
  Arrival arrival_;
};

bool fits(const Row& row) {
  return row.share.has_value() && !row.share->is_ulysses() && !row.cu_seqlens_padded.has_value();
}

Output forward(const Row& row) {
  Part part(row);
  if (part.cut_tokens() == 0 && !part.has_exchange()) {
    part.send_keys(/*is_backward=*/false);
    return attend(part.whole());
  }
  SideStream side(row.call.q);
  {
    const auto beside = side.scope();
    part.send_keys(/*is_backward=*/false);
  }
  auto [out, logsumexp] = attend(part.merges() ? part.own() : part.whole());
  Call cut;
  Output far;
  {
    const auto beside = side.scope();
    if (part.cut_tokens() == 0) {
      part.wait();
    } else {
      cut = part.cut();
      part.keep_far_rows();
      far = attend(cut);
    }
  }
  const auto& [cut_out, cut_logsumexp] = far;
  side.join({cut_out, cut_logsumexp});
  if (part.cut_tokens() == 0) return {out, logsumexp};
  if (part.merges()) {
    merge(out, logsumexp, cut, far);
    return {out, logsumexp};
  }
  out.narrow(0, 0, part.cut_tokens()).copy_(cut_out);
  logsumexp.narrow(1, 0, part.cut_tokens()).copy_(cut_logsumexp);
  return {out, logsumexp};
}

Gradients backward(const Row& row, const Outer& outer) {
  Part part(row);
  if (part.cut_tokens() == 0 && !part.has_exchange()) {
    part.send_keys(/*is_backward=*/true);
    return attend_backward(part.whole(), outer);
  }
  const int64_t tokens = part.cut_tokens();
  const Outer cut_outer{outer.grad_out.narrow(0, 0, tokens), outer.out.narrow(0, 0, tokens),
                        outer.logsumexp.narrow(1, 0, tokens)};
  SideStream side(row.call.q);
  Call cut;
  Gradients own, far;
  {
    const auto beside = side.scope();
    part.send_keys(/*is_backward=*/true);
    // Given the merged out and logsumexp, the backward of each call is exact.
    if (part.merges()) own = attend_backward(part.own_cut(), cut_outer);
    cut = part.cut();
    far = attend_backward(cut, cut_outer);
    part.send_gradients(far, own);
  }
  const auto [grad_q, grad_k, grad_v] = attend_backward(part.whole(), outer);
  Tensor own_keys;
  {
    const auto beside = side.scope();
    own_keys = part.own_gradients();
  }
  side.join({std::get<0>(own), std::get<0>(far), own_keys});
  const Tensor cut_q = grad_q.narrow(0, 0, tokens);
  if (part.merges()) {
    cut_q.copy_(std::get<0>(own));
    add(cut_q, std::get<0>(far), cut.queries, cut.keys);
  } else {
    cut_q.copy_(std::get<0>(far));
  }
  part.write_gradients(own_keys, grad_k, grad_v);
  return {grad_q, grad_k, grad_v};
}

const RegisterComposition registered({"context_parallel", fits, forward, backward});

}  // namespace
}  // namespace cuseq::attention
