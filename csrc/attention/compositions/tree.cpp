#include <utility>

#include "attention/composition.h"
#include "attention/merge.h"

// Attention over a tree: each node with itself, causal, and for each depth the descendants of the
// nodes there with those nodes. The results are merged by their logsumexp. Given the merged
// results, the backward of each call is exact, and the gradients are sums.
namespace cuseq::attention::compositions::tree {
namespace {

// Return the call of each node with itself. A window that reaches over the longest path hides
// nothing; shorter ones are refused.
Call own_call(const Row& row) {
  Call call = row.call;
  call.window.reset();
  return call;
}

Call call_of(const Row& row, const TreeCall& one) {
  Call call = own_call(row);
  call.q = row.call.q.narrow(0, 0, one.query_end);
  call.k = row.call.k.narrow(0, 0, one.key_end);
  call.v = row.call.v.narrow(0, 0, one.key_end);
  call.queries = one.queries;
  call.keys = one.keys;
  call.causal = false;
  return call;
}

// Several terms are summed in fp32, so that they are rounded once.
Tensor sum_of(const Tensor& first, size_t terms) {
  const bool widens = terms > 2 && first.element_size() == 2;
  return widens ? first.to(at::kFloat) : first;
}

bool fits(const Row& row) { return row.tree.has_value(); }

Output forward(const Row& row) {
  auto [out, logsumexp] = attend(own_call(row));
  const Tensor sum = sum_of(out, 1 + row.tree->size());
  for (const TreeCall& one : *row.tree) {
    const Call call = call_of(row, one);
    merge(sum, logsumexp, call, attend(call));
  }
  return {sum.to(out.scalar_type()), logsumexp};
}

Gradients backward(const Row& row, const Outer& outer) {
  const Tensor grad_out = outer.grad_out.contiguous();
  auto [grad_q, grad_k, grad_v] =
      attend_backward(own_call(row), {grad_out, outer.out, outer.logsumexp});
  const Tensor sum_q = sum_of(grad_q, 1 + row.tree->size());
  for (const TreeCall& call : *row.tree) {
    const auto [part_q, part_k, part_v] = attend_backward(
        call_of(row, call),
        {grad_out.narrow(0, 0, call.query_end), outer.out.narrow(0, 0, call.query_end),
         outer.logsumexp.narrow(1, 0, call.query_end).contiguous()});
    add(sum_q, part_q, call.queries, call.keys);
    // A node is the key of one of these calls, so its gradients have two terms.
    add(grad_k, part_k, call.keys, call.queries);
    add(grad_v, part_v, call.keys, call.queries);
  }
  return {sum_q.to(grad_q.scalar_type()), grad_k, grad_v};
}

const RegisterComposition registered({"tree", fits, forward, backward});

}  // namespace
}  // namespace cuseq::attention::compositions::tree
