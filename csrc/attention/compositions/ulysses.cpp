#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "attention/composition.h"
#include "attention/exchange.h"
#include "cuseq/seqlens.h"

// A rank's part of a row that is dealt in its order: exchange heads instead of keys, so that each
// rank attends with its share of the heads over the whole row (Jacobs et al. 2023,
// arXiv:2309.14509). If there are fewer key heads than ranks, several ranks get the same one.
namespace cuseq::attention::compositions::ulysses {
namespace {

constexpr int64_t kAlignment = 16;  // bytes; attention kernels load as many at a time

// Tensors [ranks, rows, ...] side by side in one message.
class Message {
 public:
  explicit Message(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const Tensor& tensor : tensors_) {
      begins_.push_back(bytes_);
      bytes_ += round_up(bytes_of(tensor), kAlignment);
    }
  }

  // Return the tensors that the other ranks sent, in the order of the ranks.
  std::vector<Tensor> exchanged(const Group& group) const {
    const int64_t ranks = tensors_.front().size(0);
    const int64_t rows = tensors_.front().size(1);
    const auto bytes = tensors_.front().options().dtype(at::kByte);
    const Tensor sent = at::empty({ranks, rows, bytes_}, bytes);
    const Tensor received = at::empty_like(sent);
    const auto from = views(sent);
    for (size_t i = 0; i < tensors_.size(); ++i) from[i].copy_(tensors_[i]);
    group.exchange(received, sent, {}, {}).wait();
    return views(received);
  }

 private:
  static int64_t bytes_of(const Tensor& tensor) {
    return c10::multiply_integers(tensor.sizes().slice(2)) *
           static_cast<int64_t>(tensor.element_size());
  }

  std::vector<Tensor> views(const Tensor& buffer) const {
    std::vector<Tensor> found;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      found.push_back(buffer.narrow(2, begins_[i], bytes_of(tensor))
                          .view(tensor.scalar_type())
                          .unflatten(2, tensor.sizes().slice(2)));
    }
    return found;
  }

  std::vector<Tensor> tensors_;
  std::vector<int64_t> begins_;
  int64_t bytes_ = 0;
};

class Part {
 public:
  Part(const Row& row, bool is_backward)
      : row_(row),
        share_(*row.share),
        ranks_(share_.at(RankMetaSlot::kCpSize)),
        tokens_(share_.at(RankMetaSlot::kRowTokens)) {
    const Call& call = row.call;
    const int64_t heads = call.q.size(1);
    const int64_t key_heads = call.k.size(1);
    TORCH_CHECK_VALUE(heads % ranks_ == 0 && (key_heads % ranks_ == 0 || ranks_ % key_heads == 0),
                      "q must have a multiple of cp_size = ", ranks_, " heads, and k a multiple ",
                      "or a divisor of it, for policy \"ulysses\", got ", heads, " and ", key_heads,
                      ": choose another policy for cp_plan");
    copies_ = key_heads % ranks_ == 0 ? 1 : ranks_ / key_heads;
    TORCH_CHECK_VALUE(tokens_ <= call.q.size(0), "q must have at least the plan's ", tokens_,
                      " tokens of each rank, got ", call.q.size(0));
    const int64_t row_elements = key_heads * (call.k.size(2) + call.v.size(2));
    group_.emplace(share_, call.q,
                   Agreement{is_backward, heads, key_heads,
                             row_elements * static_cast<int64_t>(call.k.element_size())});
  }

  const Group& group() const { return *group_; }

  // Return the heads of each rank: [ranks, tokens, own heads, dim].
  Tensor by_rank(const Tensor& rows) const {
    const Tensor own = rows.narrow(0, 0, tokens_);
    return own.unflatten(1, {ranks_, own.size(1) / ranks_}).transpose(0, 1);
  }

  Tensor keys_by_rank(const Tensor& rows) const {
    return by_rank(copies_ == 1 ? rows : rows.repeat_interleave(copies_, 1));
  }

  // Return [ranks, tokens, own heads] of [heads, tokens].
  Tensor logsumexp_by_rank(const Tensor& logsumexp) const { return by_rank(logsumexp.t()); }

  // Return the heads of this rank in all tokens as those of each rank: the inverse of whole_row.
  Tensor tokens_by_rank(const Tensor& rows) const { return rows.unflatten(0, {ranks_, tokens_}); }

  static Tensor whole_row(const Tensor& received) { return received.flatten(0, 1); }

  // Return all heads of this rank's tokens; the tail of a longer row is zero.
  Tensor own_tokens(const Tensor& received) const {
    return lengthened(received.transpose(0, 1).flatten(1, 2));
  }

  // Return the same for keys, whose copies are added up in fp32.
  Tensor own_keys(const Tensor& received) const {
    if (copies_ == 1) return own_tokens(received);
    const auto type = received.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor sums = received.unflatten(0, {ranks_ / copies_, copies_}).sum(1, false, type);
    return own_tokens(sums.to(received.scalar_type()));
  }

  // Return the whole row with this rank's heads.
  Row row_of(const std::vector<Tensor>& received) const {
    Row row;
    row.call = row_.call;
    row.call.q = whole_row(received[0]);
    row.call.k = whole_row(received[1]);
    row.call.v = whole_row(received[2]);
    row.call.queries = share_.whole_queries();
    row.call.keys = row.call.queries;
    if (row_.cu_seqlens_padded.has_value()) row.cu_seqlens_padded = share_.segment_starts();
    return row;
  }

 private:
  Tensor lengthened(const Tensor& rows) const {
    const int64_t total = row_.call.q.size(0);
    if (total == tokens_) return rows.contiguous();
    auto sizes = rows.sizes().vec();
    sizes[0] = total;
    Tensor all = at::zeros(sizes, rows.options());
    all.narrow(0, 0, tokens_).copy_(rows);
    return all;
  }

  const Row& row_;
  const RankShare& share_;
  int64_t ranks_;
  int64_t tokens_;  // of each rank
  int64_t copies_ = 1;
  std::optional<Group> group_;
};

bool fits(const Row& row) { return row.share.has_value() && row.share->is_ulysses(); }

Output forward(const Row& row) {
  const Call& own = row.call;
  const Part part(row, /*is_backward=*/false);
  const auto inputs =
      Message({part.by_rank(own.q), part.keys_by_rank(own.k), part.keys_by_rank(own.v)})
          .exchanged(part.group());
  const auto [out, logsumexp] = attend(part.row_of(inputs));
  const auto outputs = Message({part.tokens_by_rank(out), part.tokens_by_rank(logsumexp.t())})
                           .exchanged(part.group());
  return {part.own_tokens(outputs[0]), part.own_tokens(outputs[1]).t().contiguous()};
}

Gradients backward(const Row& row, const Outer& outer) {
  const Call& own = row.call;
  const Part part(row, /*is_backward=*/true);
  const auto inputs = Message({part.by_rank(own.q), part.keys_by_rank(own.k),
                               part.keys_by_rank(own.v), part.by_rank(outer.grad_out),
                               part.by_rank(outer.out), part.logsumexp_by_rank(outer.logsumexp)})
                          .exchanged(part.group());
  const auto [grad_q, grad_k, grad_v] =
      attend_backward(part.row_of(inputs), {Part::whole_row(inputs[3]), Part::whole_row(inputs[4]),
                                            Part::whole_row(inputs[5]).t().contiguous()});
  const auto grads = Message({part.tokens_by_rank(grad_q), part.tokens_by_rank(grad_k),
                              part.tokens_by_rank(grad_v)})
                         .exchanged(part.group());
  return {part.own_tokens(grads[0]), part.own_keys(grads[1]), part.own_keys(grads[2])};
}

const RegisterComposition registered({"ulysses", fits, forward, backward});

}  // namespace
}  // namespace cuseq::attention::compositions::ulysses
