// Tests of writing the first or the last rows of tensors, where only the device knows how many.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/rows.h"
#include "tensors.h"

namespace {

using at::Tensor;
using cuseq::attention::copy_head;
using cuseq::attention::Sequences;
using cuseq::attention::zero_tail;

constexpr int64_t kTokens = 300;

Sequences sequences_until(int64_t end, at::Device device) {
  const Tensor offsets = cuseq_tests::ints({0, 3, end}, at::kInt).to(device);
  return {offsets, offsets, /*first=*/0, /*longest=*/kTokens, /*num_real_tokens=*/std::nullopt};
}

// Return tensors with rows of `kTokens` tokens, each a view of a larger tensor: contiguous, of some
// heads, of odd sizes, at odd addresses, and with the tokens last in memory.
std::vector<Tensor> views(at::Device device) {
  const auto ones = [&](std::vector<int64_t> shape, at::ScalarType dtype) {
    return at::ones(shape, at::TensorOptions(device).dtype(dtype));
  };
  return {
      ones({kTokens, 4, 64}, at::kBFloat16),
      ones({kTokens, 6, 64}, at::kHalf).narrow(1, 2, 3),
      ones({kTokens, 3, 5}, at::kBFloat16),
      ones({kTokens + 1, 2, 7}, at::kFloat).narrow(0, 1, kTokens),
      ones({4, kTokens}, at::kFloat).t(),
      ones({3, kTokens}, at::kDouble).t(),
      ones({kTokens, 4, 9}, at::kHalf).narrow(2, 1, 8),
      ones({kTokens, 1, 1}, at::kBFloat16),
  };
}

void check(at::Device device) {
  for (const int64_t end : {-7L, 0L, 1L, 128L, 299L, kTokens, kTokens + 9}) {
    const int64_t first = std::clamp<int64_t>(end, 0, kTokens);
    const Sequences sequences = sequences_until(end, device);
    for (const Tensor& rows : views(device)) {
      // All of the storage: what is not in the tail must stay as it is.
      const Tensor memory = rows.as_strided(
          {static_cast<int64_t>(rows.storage().nbytes() / rows.element_size())}, {1}, 0);
      Tensor expected = memory.clone();
      expected.as_strided(rows.sizes(), rows.strides(), rows.storage_offset())
          .slice(0, first)
          .zero_();
      zero_tail({rows}, sequences);
      EXPECT_TRUE(at::equal(memory, expected)) << rows.sizes() << rows.strides() << " from " << end;
    }
    const std::vector<Tensor> several = {views(device)[0], views(device)[1], views(device)[2],
                                         views(device)[4], views(device)[5]};
    zero_tail(several, sequences);
    for (const Tensor& rows : several) {
      EXPECT_TRUE(rows.slice(0, first).eq(0).all().item<bool>());
      EXPECT_TRUE(rows.slice(0, 0, first).eq(1).all().item<bool>());
    }
  }
}

TEST(ZeroTail, WritesTheTailAloneWhateverTheStrides) { check(at::kCPU); }

TEST(ZeroTail, WritesTheTailAloneOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  check(at::kCUDA);
}

void check_copies(at::Device device) {
  for (const int64_t end : {-7L, 0L, 1L, 128L, 299L, kTokens, kTokens + 9}) {
    const int64_t rows = std::clamp<int64_t>(end, 0, kTokens);
    const Sequences sequences = sequences_until(end, device);
    for (const Tensor& to : views(device)) {
      // From rows of the same strides, and from contiguous ones.
      for (const Tensor& from : {at::zeros_like(to), at::zeros(to.sizes(), to.options())}) {
        to.fill_(1);
        const Tensor memory = to.as_strided(
            {static_cast<int64_t>(to.storage().nbytes() / to.element_size())}, {1}, 0);
        Tensor expected = memory.clone();
        expected.as_strided(to.sizes(), to.strides(), to.storage_offset())
            .slice(0, 0, rows)
            .zero_();
        copy_head({to}, {from}, sequences);
        EXPECT_TRUE(at::equal(memory, expected)) << to.sizes() << to.strides() << " up to " << end;
      }
    }
  }
  // Two at once, of other widths.
  const std::vector<Tensor> to = {at::zeros({kTokens, 2, 8}, device),
                                  at::zeros({2, kTokens}, device)};
  const Tensor values = at::rand({kTokens, 2, 8}, device);
  const Tensor numbers = at::rand({2, kTokens}, device);
  copy_head({to[0], to[1].t()}, {values, numbers.t()}, sequences_until(5, device));
  EXPECT_TRUE(at::equal(to[0].slice(0, 0, 5), values.slice(0, 0, 5)));
  EXPECT_TRUE(at::equal(to[1].slice(1, 0, 5), numbers.slice(1, 0, 5)));
  EXPECT_TRUE(to[0].slice(0, 5).eq(0).all().item<bool>());
  EXPECT_TRUE(to[1].slice(1, 5).eq(0).all().item<bool>());
}

TEST(CopyHead, WritesTheHeadAloneWhateverTheStrides) { check_copies(at::kCPU); }

TEST(CopyHead, WritesTheHeadAloneOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  check_copies(at::kCUDA);
}

TEST(ZeroTail, KnowsTheTailOfLengthsOnTheHost) {
  Sequences sequences = sequences_until(5, at::kCPU);
  sequences.num_real_tokens = 5;
  for (const Tensor& rows : views(at::kCPU)) {
    zero_tail({rows}, sequences);
    EXPECT_EQ(rows.ne(0).sum().item<int64_t>(), 5 * rows[0].numel());
  }
}

}  // namespace
