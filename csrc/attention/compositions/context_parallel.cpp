#include <ATen/ops/empty.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "attention/choice.h"
#include "attention/composition.h"
#include "attention/exchange.h"
#include "attention/rows.h"
#include "attention/side_stream.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/key_value_rows.h"

// A rank's part of a row whose documents are dealt. The current stream attends over whole
// documents. Beside it, another stream exchanges the keys that cut pieces need, and attends over
// these pieces when their keys are all there. The pieces of cut documents are the first rows of a
// rank; the keys and values of a token travel as one row, and so do their gradients. In a CUDA
// graph only the device knows how many of the first rows are those of cut pieces.
namespace cuseq::attention::compositions::context_parallel {
namespace {

template <typename Void>
Void* data_of(const Tensor& tensor) {
  if constexpr (std::is_const_v<Void>) {
    return tensor.const_data_ptr();
  } else {
    return tensor.mutable_data_ptr();
  }
}

// Return rows of two tensors [n, heads, dim] whose tokens are contiguous, as kernels read them.
template <typename Void>
KeyValueRows<Void> rows_of(const Tensor& keys, const Tensor& values) {
  return {data_of<Void>(keys), data_of<Void>(values), keys.stride(0), values.stride(0),
          keys.size(0)};
}

// Return rows of one contiguous tensor [n, width] that has keys and values side by side.
template <typename Void>
KeyValueRows<Void> rows_of(const Tensor& rows, int64_t key_width) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  Void* const keys = data_of<Void>(rows);
  Void* const values = static_cast<Byte*>(keys) + key_width * rows.element_size();
  return {keys, values, rows.size(1), rows.size(1), rows.size(0)};
}

// Return the tensor itself if the elements of each token are contiguous, else a copy.
Tensor with_whole_tokens(const Tensor& rows) {
  const bool whole = rows.stride(2) == 1 && rows.stride(1) == rows.size(2);
  return whole ? rows : rows.contiguous();
}

class Part {
 public:
  explicit Part(const Row& row)
      : row_(row),
        share_(*row.share),
        key_width_(row.call.k.size(1) * row.call.k.size(2)),
        value_width_(row.call.v.size(1) * row.call.v.size(2)),
        cut_tokens_(share_.at(RankMetaSlot::kNumCutTokens)),
        num_far_(share_.at(RankMetaSlot::kNumFarRows)) {}

  int64_t cut_tokens() const { return cut_tokens_; }
  bool has_exchange() const { return share_.at(RankMetaSlot::kAnyFar) != 0; }
  // Whether the rank has whole documents alone, and no rank needs keys of another.
  bool is_whole() const { return cut_tokens_ == 0 && !has_exchange(); }

  // Start the exchange of keys and values, or use those that the forward kept. Every rank of the
  // plan takes part, or none.
  void send_keys(bool is_backward) {
    const Call& call = row_.call;
    if (share_.at(RankMetaSlot::kCpSize) > 1) {
      const auto row_bytes =
          (key_width_ + value_width_) * static_cast<int64_t>(call.k.element_size());
      group_.emplace(share_, call.k,
                     Agreement{is_backward, call.q.size(1), call.k.size(1), row_bytes});
    }
    if (is_whole()) return;
    own_keys_ = with_whole_tokens(call.k.narrow(0, 0, cut_tokens_));
    own_values_ = with_whole_tokens(call.v.narrow(0, 0, cut_tokens_));
    far_ = share_.saves_far_rows() ? row_.far_rows->narrow(0, 0, num_far_) : side_by_side(num_far_);
    if (!has_exchange() || (is_backward && share_.saves_far_rows())) return;
    // A rank without cut pieces must refuse a backend as others do, before anything moves.
    choose(cut_call(far_));
    arrival_ =
        group_->exchange(far_, gathered(share_.sent_sources()), share_.received(), share_.sent());
  }

  // Return the call of the whole documents, over the rank's row.
  Call whole() const {
    Call call = row_.call;
    call.queries = share_.whole_queries();
    call.keys = call.queries;
    return call;
  }

  // Return the call of the cut pieces with all their keys; wait for these.
  Call cut() {
    arrival_.wait();
    return cut_call(gathered(share_.key_sources()));
  }

  void wait() { arrival_.wait(); }

  // Write the rows of the cut pieces, [cut tokens, ...], to those of all.
  void place(at::TensorList all, at::TensorList cut) const {
    std::vector<Tensor> heads;
    for (const Tensor& rows : all) heads.push_back(rows.narrow(0, 0, cut_tokens_));
    copy_head(heads, cut, share_.cut_queries());
  }

  // Start the return of the gradients of far rows, given those of the keys of `cut`.
  void send_gradients(const Gradients& cut) {
    std::tie(std::ignore, grad_keys_, grad_values_) = cut;
    returned_ = side_by_side(share_.at(RankMetaSlot::kNumSentRows));
    if (!has_exchange()) return;
    const Tensor far = side_by_side(num_far_);
    sum(cut_tokens_, rows_of<void>(far, key_width_));
    arrival_ = group_->exchange(returned_, far, share_.sent(), share_.received());
  }

  // Write the gradients of the keys and values of the cut pieces; after `wait`.
  void write_gradients(const Tensor& grad_k, const Tensor& grad_v) const {
    sum(0, rows_of<void>(grad_k.narrow(0, 0, cut_tokens_), grad_v.narrow(0, 0, cut_tokens_)));
  }

 private:
  Tensor side_by_side(int64_t rows) const {
    return at::empty({rows, key_width_ + value_width_}, row_.call.k.options());
  }
  // Return views of the keys and the values in rows [n, width].
  Tensor keys_of(const Tensor& rows) const {
    return rows.narrow(1, 0, key_width_).unflatten(1, {row_.call.k.size(1), row_.call.k.size(2)});
  }
  Tensor values_of(const Tensor& rows) const {
    return rows.narrow(1, key_width_, value_width_)
        .unflatten(1, {row_.call.v.size(1), row_.call.v.size(2)});
  }

  // Return the rows [n, width] of keys and values that `index` names: own ones, then far ones.
  Tensor gathered(const Tensor& index) const {
    Tensor rows = side_by_side(index.size(0));
    GatherKeyValuesArgs args;
    args.sources.first = rows_of<const void>(own_keys_, own_values_);
    args.sources.second = rows_of<const void>(far_, key_width_);
    args.index = index.const_data_ptr<int32_t>();
    args.out = rows_of<void>(rows, key_width_);
    args.key_width = key_width_;
    args.value_width = value_width_;
    args.type = float_type(rows, "k");
    CUSEQ_RUN(gather_key_values, rows, args);
    return rows;
  }

  // Return the call of the cut pieces, given the rows of their keys and values.
  Call cut_call(const Tensor& rows) const {
    Call call = row_.call;
    call.q = call.q.narrow(0, 0, cut_tokens_);
    call.k = keys_of(rows);
    call.v = values_of(rows);
    call.queries = share_.cut_queries();
    call.keys = share_.cut_keys();
    call.all_have_keys = true;
    return call;
  }

  // Sum the gradients of the sources from `first` on, as many as rows of `out`, over their terms.
  void sum(int64_t first, const KeyValueRows<void>& out) const {
    const Tensor offsets = share_.term_offsets(first, out.count);
    const Tensor terms = share_.terms();
    SumKeyValuesArgs args;
    args.sources.first = rows_of<const void>(grad_keys_, grad_values_);
    args.sources.second = rows_of<const void>(returned_, key_width_);
    args.offsets = offsets.const_data_ptr<int32_t>();
    args.terms = terms.const_data_ptr<int32_t>();
    args.num_terms = terms.size(0);
    args.out = out;
    args.key_width = key_width_;
    args.value_width = value_width_;
    args.type = float_type(returned_, "k");
    CUSEQ_RUN(sum_key_values, returned_, args);
  }

  const Row& row_;
  const RankShare& share_;
  int64_t key_width_;  // elements of a row
  int64_t value_width_;
  int64_t cut_tokens_;
  int64_t num_far_;
  Tensor own_keys_;  // of the cut pieces, [cut tokens, key_heads, head_dim]
  Tensor own_values_;
  Tensor far_;        // [far rows, width]
  Tensor grad_keys_;  // of key rows, [n, key_heads, head_dim]
  Tensor grad_values_;
  Tensor returned_;  // gradients from other ranks, [sent rows, width]
  std::optional<Group> group_;
  Arrival arrival_;
};

bool fits(const Row& row) {
  return row.share.has_value() && !row.share->is_ulysses() && !row.cu_seqlens_padded.has_value();
}

Output forward(const Row& row) {
  Part part(row);
  if (part.is_whole()) {
    part.send_keys(/*is_backward=*/false);
    return attend(part.whole());
  }
  SideStream side(row.call.q);
  {
    const auto beside = side.scope();
    part.send_keys(/*is_backward=*/false);
  }
  const auto [out, logsumexp] = attend(part.whole());
  Output cut;
  {
    const auto beside = side.scope();
    if (part.cut_tokens() == 0) {
      part.wait();
    } else {
      cut = attend(part.cut());
    }
  }
  const auto reading = side.join();
  if (part.cut_tokens() == 0) return {out, logsumexp};
  const auto& [cut_out, cut_logsumexp] = cut;
  part.place({out, logsumexp.t()}, {cut_out, cut_logsumexp.t()});
  return {out, logsumexp};
}

Gradients backward(const Row& row, const Outer& outer) {
  Part part(row);
  if (part.is_whole()) {
    part.send_keys(/*is_backward=*/true);
    return attend_backward(part.whole(), outer);
  }
  const int64_t tokens = part.cut_tokens();
  const Outer cut_outer{outer.grad_out.narrow(0, 0, tokens), outer.out.narrow(0, 0, tokens),
                        outer.logsumexp.narrow(1, 0, tokens)};
  SideStream side(row.call.q);
  Gradients cut;
  {
    const auto beside = side.scope();
    part.send_keys(/*is_backward=*/true);
    cut = attend_backward(part.cut(), cut_outer);
    part.send_gradients(cut);
  }
  const auto [grad_q, grad_k, grad_v] = attend_backward(part.whole(), outer);
  {
    const auto beside = side.scope();
    part.wait();
  }
  const auto reading = side.join();
  if (tokens > 0) part.place({grad_q}, {std::get<0>(cut)});
  part.write_gradients(grad_k, grad_v);
  return {grad_q, grad_k, grad_v};
}

const RegisterComposition registered({"context_parallel", fits, forward, backward});

}  // namespace
}  // namespace cuseq::attention::compositions::context_parallel
