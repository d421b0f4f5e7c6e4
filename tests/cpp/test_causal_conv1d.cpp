// Tests of the convolution's arithmetic on sequences, of its op as a C++ program calls it, and of
// the chunks of a row.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "cuseq/ops.h"
#include "layout/chunks.h"
#include "ops/causal_conv1d.h"
#include "tensors.h"

namespace {

using cuseq_tests::ints;
using cuseq_tests::Values;
using cuseq_tests::values_of;

std::vector<uint32_t> lags_of(const cuseq::ConvSequences& sequences) {
  std::vector<uint32_t> lags;
  for (int64_t token = 0; token < sequences.tokens; ++token) {
    lags.push_back(sequences.lags(0, token, 0, sequences.segments.seqlens.n_seqs));
  }
  return lags;
}

cuseq::ConvSequences sequences_of(int64_t tokens, int width) {
  cuseq::ConvSequences sequences;
  sequences.batch = 1;
  sequences.tokens = tokens;
  sequences.width = width;
  sequences.segments.total_tokens = tokens;
  return sequences;
}

TEST(ConvSequences, LagsStayInTheSequence) {
  const std::vector<int32_t> offsets = {0, 2, 2, 7};
  cuseq::ConvSequences sequences = sequences_of(8, 4);
  EXPECT_EQ(lags_of(sequences), (std::vector<uint32_t>{1, 3, 7, 15, 15, 15, 15, 15}));
  sequences.segments.seqlens = {offsets.data(), 3};
  EXPECT_EQ(lags_of(sequences), (std::vector<uint32_t>{1, 3, 1, 3, 7, 15, 15, 0}));
  sequences.width = 2;
  EXPECT_EQ(lags_of(sequences), (std::vector<uint32_t>{1, 3, 1, 3, 3, 3, 3, 0}));
}

TEST(ConvSequences, PaddingHasNoLags) {
  const std::vector<int32_t> real = {0, 1, 3};
  const std::vector<int32_t> padded = {0, 4, 8};
  cuseq::ConvSequences sequences = sequences_of(9, 3);
  sequences.segments.seqlens = {padded.data(), 2};
  sequences.segments.cu_seqlens_real = real.data();
  EXPECT_EQ(lags_of(sequences), (std::vector<uint32_t>{1, 0, 0, 0, 1, 3, 0, 0, 0}));
  EXPECT_EQ(sequences.length(0), 1);
  EXPECT_EQ(sequences.begin(1), 4);
}

TEST(ConvSequences, IndicesCompareTokenByToken) {
  const std::vector<int32_t> seq_idx = {0, 1, 0, 0, -1, 0};
  cuseq::ConvSequences sequences = sequences_of(6, 3);
  sequences.seq_idx = seq_idx.data();
  sequences.seq_idx_strides[1] = 1;
  EXPECT_EQ(lags_of(sequences), (std::vector<uint32_t>{1, 1, 5, 3, 0, 5}));
}

TEST(ConvSequences, NoOffsetsLeadOutOfTheRow) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  const std::vector<std::vector<int32_t>> all = {
      {-5, 3}, {kMin, kMax}, {kMax, kMin, 4}, {3, 1, 9}, {0, kMax}};
  for (const std::vector<int32_t>& offsets : all) {
    cuseq::ConvSequences sequences = sequences_of(6, 4);
    sequences.segments.seqlens = {offsets.data(), static_cast<int64_t>(offsets.size()) - 1};
    for (int64_t token = 0; token < 6; ++token) {
      const uint32_t lags = sequences.lags(0, token, 0, sequences.count());
      EXPECT_EQ(lags >> (token + 1), 0u) << "token " << token;
    }
    for (int64_t sequence = 0; sequence < sequences.count(); ++sequence) {
      EXPECT_GE(sequences.begin(sequence), 0);
      EXPECT_GE(sequences.length(sequence), 0);
      if (sequences.length(sequence) > 0) {
        EXPECT_LE(sequences.begin(sequence) + sequences.length(sequence), 6);
      }
    }
  }
}

TEST(CausalConv1d, LiteralCase) {
  const at::Tensor x = at::ones({5, 1});
  const at::Tensor weight = at::ones({1, 4});
  cuseq::ConvOptions options;
  options.cu_seqlens = ints({0, 2, 5}, at::kInt);
  options.final_states = true;
  const std::vector<at::Tensor> found =
      cuseq::causal_conv1d(x, weight, /*bias=*/std::nullopt, options);
  EXPECT_EQ(values_of(found[0]), (Values{1, 2, 1, 2, 3}));
  EXPECT_EQ(found[1].sizes(), (std::vector<int64_t>{2, 1, 3}));
  EXPECT_EQ(values_of(found[1]), (Values{0, 1, 1, 1, 1, 1}));
}

TEST(CausalConv1d, GradientsWithoutPython) {
  const auto float64 = at::TensorOptions(at::kDouble);
  const at::Tensor x = at::randn({40, 3}, float64).requires_grad_();
  const at::Tensor weight = at::randn({3, 4}, float64).requires_grad_();
  const at::Tensor bias = at::randn({3}, float64).requires_grad_();
  cuseq::ConvOptions options;
  options.silu = true;
  const at::Tensor out = cuseq::causal_conv1d(x, weight, bias, options)[0];
  const at::Tensor expected = at::silu(at::conv1d(x.t().unsqueeze(0), weight.unsqueeze(1), bias, 1,
                                                  at::IntArrayRef{3}, 1, /*groups=*/3)
                                           .slice(2, 0, 40))
                                  .squeeze(0)
                                  .t();
  EXPECT_TRUE(at::allclose(out, expected));
  out.square().sum().backward();
  const std::vector<at::Tensor> found = {x.grad().clone(), weight.grad().clone(),
                                         bias.grad().clone()};
  for (const at::Tensor& tensor : {x, weight, bias}) tensor.mutable_grad().reset();
  expected.square().sum().backward();
  EXPECT_TRUE(at::allclose(found[0], x.grad()));
  EXPECT_TRUE(at::allclose(found[1], weight.grad()));
  EXPECT_TRUE(at::allclose(found[2], bias.grad()));
}

TEST(Chunks, RunsCoverTheRowWithoutEmptyOnes) {
  const at::Tensor lengths = ints({3, 0, 2, 0}, at::kInt);
  EXPECT_EQ(values_of(cuseq::recurrent_offsets(lengths, std::nullopt, 5)), (Values{0, 3, 5}));
  EXPECT_EQ(values_of(cuseq::recurrent_offsets(lengths, std::nullopt, 6)), (Values{0, 3, 5, 6}));
  const at::Tensor segments = ints({4, 0, 4, 0}, at::kInt);
  EXPECT_EQ(values_of(cuseq::recurrent_offsets(lengths, segments, 12)),
            (Values{0, 3, 4, 6, 8, 12}));
  EXPECT_EQ(values_of(cuseq::recurrent_offsets(ints({}, at::kInt), std::nullopt, 0)), (Values{0}));
}

TEST(Chunks, ChunksOfRuns) {
  const auto [indices, first] = cuseq::chunks_of(ints({0, 3, 4, 8}, at::kInt), 2);
  EXPECT_EQ(values_of(indices), (Values{0, 0, 0, 1, 1, 0, 2, 0, 2, 1}));
  EXPECT_EQ(values_of(first), (Values{0, 2, 3, 5}));
  EXPECT_EQ(std::get<0>(cuseq::chunks_of(ints({0}, at::kInt), 2)).sizes(),
            (std::vector<int64_t>{0, 2}));
  EXPECT_THROW(cuseq::chunks_of(ints({0, 3}, at::kInt), 0), c10::ValueError);
}

}  // namespace
