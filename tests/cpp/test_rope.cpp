#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cuseq/rope.h"
#include "tensors.h"

// C++ tests of the behaviour that tests/python/rope/test_rope.py tests from Python.
namespace {

using cuseq_tests::ints;

TEST(ApplyRope, PositionsRestartAndTheInverseTurnsBack) {
  const at::Tensor q = at::randn({5, 2, 4}, at::kDouble);
  const at::Tensor k = at::randn({5, 1, 4}, at::kDouble);
  const at::Tensor angles = at::randn({3, 2}, at::kDouble);
  cuseq::RopeOptions options;
  options.cos = angles.cos();
  options.sin = angles.sin();
  options.cu_seqlens = ints({0, 2, 5}, at::kInt);
  const auto turned = cuseq::apply_rope({q, k}, options);
  ASSERT_EQ(turned.size(), 2u);

  // Tokens 1 and 3 are each the second token of their sequence.
  const at::Tensor a = q.narrow(2, 0, 2);
  const at::Tensor b = q.narrow(2, 2, 2);
  for (const int64_t token : {1, 3}) {
    const at::Tensor c = options.cos[1];
    const at::Tensor s = options.sin[1];
    const at::Tensor expected =
        at::cat({a[token] * c - b[token] * s, b[token] * c + a[token] * s}, /*dim=*/1);
    EXPECT_TRUE(turned[0][token].allclose(expected)) << token;
  }

  options.inverse = true;
  EXPECT_TRUE(cuseq::apply_rope({turned[0]}, options)[0].allclose(q));
  cuseq::apply_rope_({turned[1]}, options);
  EXPECT_TRUE(turned[1].allclose(k));
}

TEST(ApplyQkNormRope, NormalisesBeforeItTurns) {
  const at::Tensor q = at::randn({3, 2, 8}, at::kDouble);
  const at::Tensor weight = at::randn({8}, at::kDouble);
  const at::Tensor angles = at::randn({3, 4}, at::kDouble);
  cuseq::RopeOptions options;
  options.cos = angles.cos();
  options.sin = angles.sin();
  const auto [outputs, rstds] = cuseq::apply_qk_norm_rope({q}, {weight}, 1e-6, 1.0, options);
  const at::Tensor rstd = (q.pow(2).mean(-1, true) + 1e-6).rsqrt();
  EXPECT_TRUE(rstds[0].allclose(rstd.squeeze(-1).unsqueeze(0)));
  const at::Tensor expected = cuseq::apply_rope({q * rstd * (weight + 1.0)}, options)[0];
  EXPECT_TRUE(outputs[0].allclose(expected));
}

}  // namespace
