// Tests of the C++ API of cuseq/ops.h and cuseq/attention.h as a program without Python uses it,
// and of the host copies of layouts.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cache/host_copies.h"
#include "cuseq/attention.h"
#include "cuseq/ops.h"
#include "layout/host_meta.h"
#include "tensors.h"

namespace {

using cuseq_tests::ints;
using cuseq_tests::Values;
using cuseq_tests::values_of;

template <typename Error, typename Call>
void expect_error(const Call& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown, expected: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
        << error.what_without_backtrace();
  }
}

TEST(Ops, LiteralCase) {
  for (const at::ScalarType dtype : {at::kInt, at::kLong}) {
    const at::Tensor lengths = ints({2, 3}, dtype);
    EXPECT_EQ(values_of(cuseq::cu_seqlens(lengths)), (Values{0, 2, 5}));
    EXPECT_EQ(values_of(cuseq::max_seqlen(lengths)), (Values{3}));
    EXPECT_EQ(cuseq::max_seqlen(lengths).dim(), 0);
    EXPECT_EQ(values_of(cuseq::last_token_indices(lengths)), (Values{1, 4}));
    EXPECT_EQ(values_of(cuseq::position_ids(lengths, 6)), (Values{0, 1, 0, 1, 2, 0}));
    EXPECT_EQ(values_of(cuseq::seq_ids(lengths, 6)), (Values{0, 0, 1, 1, 1, 2}));
    EXPECT_EQ(cuseq::cu_seqlens(lengths).scalar_type(), at::kInt);
    EXPECT_EQ(cuseq::position_ids(lengths, 6).scalar_type(), at::kInt);
  }
}

TEST(Ops, StridedAndEmptyLengths) {
  const at::Tensor column = ints({2, 9, 0, 9, 3, 9}).reshape({3, 2}).select(1, 0);
  ASSERT_FALSE(column.is_contiguous());
  EXPECT_EQ(values_of(cuseq::cu_seqlens(column)), (Values{0, 2, 2, 5}));
  EXPECT_EQ(values_of(cuseq::last_token_indices(column)), (Values{1, -1, 4}));
  EXPECT_EQ(values_of(cuseq::cu_seqlens(ints({}))), (Values{0}));
  EXPECT_EQ(values_of(cuseq::max_seqlen(ints({}))), (Values{0}));
  EXPECT_EQ(values_of(cuseq::seq_ids(ints({}), 2)), (Values{0, 0}));
}

TEST(Ops, ErrorsNameArgumentIndexAndValue) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  expect_error<c10::ValueError>([] { cuseq::cu_seqlens(ints({2, -3})); }, "lengths[1] = -3");
  expect_error<c10::ValueError>([] { cuseq::max_seqlen(ints({kMax, 1})); }, "lengths[1] = 1");
  expect_error<c10::ValueError>([] { cuseq::seq_ids(ints({2, 3}), 4); }, "total_tokens = 4");
  expect_error<c10::ValueError>([] { cuseq::position_ids(ints({2}), -1); }, "total_tokens");
  expect_error<c10::TypeError>([] { cuseq::cu_seqlens(at::ones({2})); }, "int32 or int64");
}

TEST(Ops, TheDispatcherKnowsThem) {
  for (const char* name :
       {"cuseq::cu_seqlens", "cuseq::max_seqlen", "cuseq::max_seqlen_sync",
        "cuseq::last_token_indices", "cuseq::position_ids", "cuseq::seq_ids",
        "cuseq::lengths_from_padding_mask", "cuseq::cu_seqlens_from_position_ids",
        "cuseq::mask_boundary_labels", "cuseq::varlen_attention", "cuseq::cached_cu_seqlens",
        "cuseq::cached_position_ids", "cuseq::cached_seq_ids"}) {
    EXPECT_TRUE(c10::Dispatcher::singleton().findSchema({name, ""}).has_value()) << name;
  }
}

TEST(Ops, AttentionStaysInsideItsSequence) {
  at::manual_seed(3);
  const auto rows = [] { return at::randn({6, 2, 8}, at::kDouble); };
  const at::Tensor query = rows();
  const at::Tensor key = rows();
  const at::Tensor value = rows();
  const at::Tensor offsets = ints({0, 2, 5}, at::kInt);
  const auto [out, logsumexp] = cuseq::varlen_attention(query, key, value, {.cu_seqlens = offsets});
  EXPECT_EQ(logsumexp.sizes(), (c10::IntArrayRef{2, 6}));
  const auto heads_first = [](const at::Tensor& tensor, int64_t begin, int64_t end) {
    return tensor.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
  };
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 5}}) {
    const at::Tensor expected = at::scaled_dot_product_attention(
        heads_first(query, begin, end), heads_first(key, begin, end),
        heads_first(value, begin, end), {}, 0.0, /*is_causal=*/true);
    EXPECT_TRUE(at::allclose(heads_first(out, begin, end), expected));
  }
  EXPECT_EQ(out.slice(0, 5).abs().max().item<double>(), 0.0) << "the tail is zero";
}

TEST(HostMeta, SlotsAreAContractWithPython) {
  EXPECT_EQ(cuseq::kNumSeqs, 0);
  EXPECT_EQ(cuseq::kMaxSeqlen, 1);
  EXPECT_EQ(cuseq::kTotalTokens, 2);
  EXPECT_EQ(cuseq::kNumRealTokens, 3);
  EXPECT_EQ(cuseq::kStatus, 4);
  EXPECT_EQ(cuseq::kLengthDivisor, 5);
  EXPECT_EQ(cuseq::kHostMetaSize, 6);
  // Status values are bits: several errors may occur at once.
  EXPECT_EQ(cuseq::kNegativeLength & cuseq::kSumAboveTotal, 0);
  EXPECT_EQ(cuseq::kFirstOffsetNotZero & cuseq::kTooManySequences, 0);
  EXPECT_EQ((cuseq::kNegativeLength | cuseq::kSumAboveTotal) &
                (cuseq::kFirstOffsetNotZero | cuseq::kTooManySequences),
            0);
}

TEST(HostCopies, HostTensorsAreThereAtOnce) {
  const at::Tensor meta = ints({2, 3, 6, 5, 0, 1}, at::kInt);
  EXPECT_TRUE(cuseq::start_host_copy({{meta}})[0].is_same(meta));
  cuseq::wait_host_copy(meta);
  EXPECT_EQ(cuseq::read_host_meta(meta, cuseq::kNumSeqs), 2);
  EXPECT_EQ(cuseq::read_host_meta(meta, cuseq::kMaxSeqlen), 3);
  EXPECT_EQ(cuseq::read_host_meta(meta, cuseq::kNumRealTokens), 5);
}

TEST(HostCopies, WrongMetaIsRefused) {
  const at::Tensor meta = ints({2, 3, 6, 5, 0, 1}, at::kInt);
  for (const int64_t slot : {-1, 6}) {
    expect_error<c10::ValueError>([&] { cuseq::read_host_meta(meta, slot); }, "slot");
  }
  for (const at::Tensor& wrong : {meta.to(at::kLong), meta.slice(0, 0, 5), meta.unsqueeze(0),
                                  at::zeros({6, 2}, at::kInt).select(1, 0)}) {
    expect_error<c10::ValueError>([&] { cuseq::read_host_meta(wrong, 0); }, "host_meta");
  }
  const std::pair<int64_t, const char*> statuses[] = {
      {cuseq::kNegativeLength, "negative"},
      {cuseq::kSumAboveTotal, "total_tokens = 6"},
      {cuseq::kFirstOffsetNotZero, "start at 0"},
      {cuseq::kTooManySequences, "max_seqs"},
  };
  for (const auto& [status, part] : statuses) {
    expect_error<c10::ValueError>(
        [&] { cuseq::read_host_meta(ints({2, 3, 6, 5, status, 1}, at::kInt), cuseq::kMaxSeqlen); },
        part);
  }
}

}  // namespace
