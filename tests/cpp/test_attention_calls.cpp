// Tests of attention calls whose queries and keys lie in two rows, on the CPU: against plain
// attention of each pair, and of one row's keys that are dealt to two calls.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>
#include <vector>

#include "attention/call.h"
#include "tensors.h"

namespace {

using at::Tensor;
using cuseq::attention::attend;
using cuseq::attention::attend_backward;
using cuseq::attention::Call;
using cuseq::attention::Gradients;
using cuseq::attention::Outer;
using cuseq::attention::Output;
using cuseq::attention::Sequences;
using cuseq_tests::ints;

constexpr int64_t kHeads = 4;
constexpr int64_t kKeyHeads = 2;
constexpr int64_t kHeadDim = 8;
constexpr int64_t kValueDim = 5;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Lengths = std::vector<int64_t>;

Sequences sequences_of(const Lengths& lengths) {
  Lengths offsets = {0};
  int64_t longest = 0;
  for (const int64_t length : lengths) {
    offsets.push_back(offsets.back() + length);
    longest = std::max(longest, length);
  }
  const Tensor tensor = ints(offsets, at::kInt);
  return {tensor, tensor, /*first=*/0, longest, offsets.back()};
}

int64_t offset(const Sequences& sequences, int64_t i) {
  return sequences.offsets.const_data_ptr<int32_t>()[i];
}

// Return a call of random rows with a tail of two queries and of three keys.
Call call_of(const Lengths& queries, const Lengths& keys) {
  Call call;
  call.queries = sequences_of(queries);
  call.keys = sequences_of(keys);
  call.q = at::randn({*call.queries.num_real_tokens + 2, kHeads, kHeadDim}, at::kDouble);
  call.k = at::randn({*call.keys.num_real_tokens + 3, kKeyHeads, kHeadDim}, at::kDouble);
  call.v = at::randn({*call.keys.num_real_tokens + 3, kKeyHeads, kValueDim}, at::kDouble);
  call.causal = false;
  call.scale = 0.3;
  return call;
}

// Return bool [n, m]: the keys that query i of n sees.
Tensor seen_by(const Call& call, int64_t n, int64_t m) {
  const Tensor place = at::arange(n).add(m - n).unsqueeze(1);
  const Tensor key = at::arange(m).unsqueeze(0);
  Tensor seen = at::ones({n, m}, at::kBool);
  if (call.causal) seen = seen.logical_and(key.le(place));
  if (call.window.has_value()) {
    seen = seen.logical_and(key.gt(place.sub(*call.window)))
               .logical_and(key.lt(place.add(*call.window)));
  }
  return seen;
}

Tensor bhsd(const Tensor& rows, int64_t begin, int64_t end) {
  const Tensor heads = rows.slice(0, begin, end).transpose(0, 1);
  return heads.repeat_interleave(kHeads / rows.size(1), 0);
}

// Compute the call pair by pair with a softmax over all keys.
Output plain_attention(const Call& call) {
  Tensor out = at::zeros({call.q.size(0), kHeads, kValueDim}, at::kDouble);
  Tensor logsumexp = at::zeros({kHeads, call.q.size(0)}, at::kDouble);
  for (int64_t i = 0; i < call.queries.count(); ++i) {
    const int64_t begin = offset(call.queries, i), end = offset(call.queries, i + 1);
    const int64_t first = offset(call.keys, i), last = offset(call.keys, i + 1);
    Tensor scores =
        bhsd(call.q, begin, end).matmul(bhsd(call.k, first, last).transpose(1, 2)) * call.scale;
    if (call.softcap.has_value()) scores = (scores / *call.softcap).tanh() * *call.softcap;
    scores = scores.masked_fill(seen_by(call, end - begin, last - first).logical_not(), -kInfinity);
    const Tensor weights = at::nan_to_num(scores.softmax(2), 0.0);
    out.slice(0, begin, end).copy_(weights.matmul(bhsd(call.v, first, last)).transpose(0, 1));
    logsumexp.slice(1, begin, end).copy_(scores.logsumexp(2));
  }
  return {out, logsumexp};
}

// Return the derivative of sum(out * grad_out) with respect to each element, by central
// differences along one random direction per tensor.
double slope(const Call& call, const Tensor& grad_out, Tensor Call::* rows, const Tensor& way) {
  constexpr double kStep = 1e-4;
  const auto at_step = [&](double step) {
    Call moved = call;
    moved.*rows = call.*rows + step * way;
    return std::get<0>(plain_attention(moved)).mul(grad_out).sum().item<double>();
  };
  return (at_step(kStep) - at_step(-kStep)) / (2 * kStep);
}

void expect_close(const Tensor& value, const Tensor& expected) {
  ASSERT_EQ(value.sizes(), expected.sizes());
  EXPECT_TRUE(value.allclose(expected, 1e-9, 1e-9)) << value << "\nexpected\n" << expected;
}

void expect_exact(const Call& call) {
  const auto [out, logsumexp] = attend(call);
  const auto [plain_out, plain_logsumexp] = plain_attention(call);
  expect_close(out, plain_out);
  expect_close(logsumexp, plain_logsumexp);
  Tensor grad_out = at::randn_like(out);
  const auto [grad_q, grad_k, grad_v] = attend_backward(call, {grad_out, out, logsumexp});
  grad_out.slice(0, *call.queries.num_real_tokens).zero_();
  const auto expect_slope = [&](const Tensor& grad, Tensor Call::* rows, const char* name) {
    ASSERT_EQ(grad.sizes(), (call.*rows).sizes());
    const Tensor way = at::randn_like(grad);
    EXPECT_NEAR(grad.mul(way).sum().item<double>(), slope(call, grad_out, rows, way), 1e-5) << name;
  };
  expect_slope(grad_q, &Call::q, "q");
  expect_slope(grad_k, &Call::k, "k");
  expect_slope(grad_v, &Call::v, "v");
  EXPECT_TRUE(grad_k.slice(0, *call.keys.num_real_tokens).eq(0).all().item<bool>());
}

// The second pair has no keys, the third no queries, the last one query.
Call gappy_call() { return call_of({3, 2, 0, 6, 1}, {4, 0, 2, 3, 5}); }

TEST(AttentionCalls, QueriesSeeAllKeysOfTheirPair) { expect_exact(gappy_call()); }

TEST(AttentionCalls, SoftCapsBoundScores) {
  Call call = gappy_call();
  call.softcap = 0.7;
  expect_exact(call);
}

TEST(AttentionCalls, CausalCallsEndAtTheLastKey) {
  Call call = call_of({3, 2, 0, 4, 1}, {7, 0, 2, 4, 5});
  call.causal = true;
  expect_exact(call);
  call.softcap = 0.7;
  expect_exact(call);
}

TEST(AttentionCalls, CausalQueriesBeforeTheFirstKeySeeNone) {
  Call call = call_of({3, 5}, {3, 2});
  call.causal = true;
  expect_exact(call);
}

TEST(AttentionCalls, WindowsCountFromTheQuery) {
  for (const bool causal : {true, false}) {
    for (const int64_t window : {1, 2, 4, 6}) {
      Call call = causal ? call_of({3, 2, 0, 4, 1}, {7, 0, 2, 4, 5}) : gappy_call();
      call.causal = causal;
      call.window = window;
      expect_exact(call);
    }
  }
}

TEST(AttentionCalls, LongPairsRunInParts) {
  Call call = call_of({140}, {260});
  call.causal = true;
  call.window = 130;
  expect_exact(call);
  call.window.reset();
  expect_exact(call);
}

TEST(AttentionCalls, QueriesWithoutKeysHaveNoWeight) {
  const Call call = call_of({2, 3}, {0, 0});
  const auto [out, logsumexp] = attend(call);
  EXPECT_TRUE(out.eq(0).all().item<bool>());
  EXPECT_TRUE(logsumexp.slice(1, 0, 5).eq(-kInfinity).all().item<bool>());
  EXPECT_TRUE(logsumexp.slice(1, 5).eq(0).all().item<bool>());
  const auto [grad_q, grad_k, grad_v] = attend_backward(call, {at::ones_like(out), out, logsumexp});
  EXPECT_TRUE(grad_q.eq(0).all().item<bool>());
}

TEST(AttentionCalls, OffsetsMayLieInsideACallersTensor) {
  Call call = gappy_call();
  const auto [out, logsumexp] = attend(call);
  const Tensor all = at::cat({ints({9, 9}, at::kInt), call.keys.offsets});
  call.keys = {all.slice(0, 2), all, /*first=*/2, call.keys.longest, call.keys.num_real_tokens};
  expect_close(std::get<0>(attend(call)), out);
}

// The keys of a causal row are dealt to two calls: each piece with itself, and the second piece
// with the first. The merged result has the gradients of the one call.
TEST(AttentionCalls, GradientsOfMergedCallsAddUp) {
  const Tensor q = at::randn({9, kHeads, kHeadDim}, at::kDouble);
  const Tensor k = at::randn({9, kKeyHeads, kHeadDim}, at::kDouble);
  const Tensor v = at::randn({9, kKeyHeads, kValueDim}, at::kDouble);
  const auto over = [&](const Lengths& queries, const Lengths& keys, bool causal) {
    Call call;
    call.q = q;
    call.k = k;
    call.v = v;
    call.queries = sequences_of(queries);
    call.keys = sequences_of(keys);
    call.causal = causal;
    call.scale = 0.4;
    return call;
  };
  const Call whole = over({9}, {9}, true);
  const std::vector<Call> parts = {over({4, 5}, {4, 5}, true), over({4, 5, 0}, {0, 4, 5}, false)};
  const auto [out, logsumexp] = attend(whole);
  Tensor merged = at::zeros_like(out);
  Tensor total = at::full_like(logsumexp, -kInfinity);
  for (const Call& part : parts) total = at::logaddexp(total, std::get<1>(attend(part)));
  for (const Call& part : parts) {
    const auto [part_out, part_logsumexp] = attend(part);
    merged += part_out * (part_logsumexp - total).exp().t().unsqueeze(2);
  }
  expect_close(merged, out);
  expect_close(total, logsumexp);
  const Tensor grad_out = at::randn_like(out);
  const auto [grad_q, grad_k, grad_v] = attend_backward(whole, {grad_out, out, logsumexp});
  Tensor sum_q = at::zeros_like(q), sum_k = at::zeros_like(k), sum_v = at::zeros_like(v);
  for (const Call& part : parts) {
    const auto [part_q, part_k, part_v] = attend_backward(part, {grad_out, merged, total});
    sum_q += part_q;
    sum_k += part_k;
    sum_v += part_v;
  }
  expect_close(sum_q, grad_q);
  expect_close(sum_k, grad_k);
  expect_close(sum_v, grad_v);
}

// Return the same call on a GPU in fp32.
Call on_gpu(Call call) {
  for (Sequences* sequences : {&call.queries, &call.keys}) {
    sequences->offsets = sequences->offsets.cuda();
    sequences->cu_seqlens = sequences->offsets;
  }
  for (Tensor* rows : {&call.q, &call.k, &call.v}) *rows = rows->to(at::kCUDA, at::kFloat);
  return call;
}

void expect_same_on_gpu(const Call& call) {
  const auto [out, logsumexp] = attend(call);
  const Tensor grad_out = at::randn_like(out);
  const auto [grad_q, grad_k, grad_v] = attend_backward(call, {grad_out, out, logsumexp});
  const Call there = on_gpu(call);
  const auto [gpu_out, gpu_logsumexp] = attend(there);
  const auto grads = attend_backward(
      there, {grad_out.to(at::kCUDA, at::kFloat).contiguous(), gpu_out, gpu_logsumexp});
  const auto expect_near = [](const Tensor& value, const Tensor& expected, const char* name) {
    EXPECT_TRUE(value.cpu().to(at::kDouble).allclose(expected, 1e-3, 1e-4)) << name;
  };
  expect_near(gpu_out, out, "out");
  expect_near(gpu_logsumexp, logsumexp, "logsumexp");
  expect_near(std::get<0>(grads), grad_q, "grad_q");
  expect_near(std::get<1>(grads), grad_k, "grad_k");
  expect_near(std::get<2>(grads), grad_v, "grad_v");
}

// PyTorch's memory-efficient kernel misplaces such windows in its backward, so it must not get
// them.
TEST(AttentionCalls, WindowsOverAnotherRowAreExactOnGpus) {
  if (!at::hasCUDA()) {
    ASSERT_EQ(std::getenv("CUSEQ_REQUIRE_CUDA"), nullptr) << "there is no GPU";
    GTEST_SKIP() << "there is no GPU";
  }
  Call call = call_of({40, 0, 100, 7}, {170, 5, 130, 7});
  call.causal = true;
  expect_same_on_gpu(call);
  call.window = 60;
  expect_same_on_gpu(call);
  call.backend = "efficient";
  EXPECT_THROW(attend(on_gpu(call)), c10::ValueError);
}

}  // namespace
