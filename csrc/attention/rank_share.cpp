#include "attention/rank_share.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ops/checks.h"
#include "ops/dtype_name.h"

namespace cuseq::attention {
namespace {

constexpr auto kSize = static_cast<int64_t>(RankMetaSlot::kSize);

std::vector<int64_t> numbers_of(const Tensor& rank_meta) {
  TORCH_CHECK_VALUE(
      rank_meta.is_cpu() && rank_meta.scalar_type() == at::kInt && rank_meta.dim() == 1 &&
          rank_meta.is_contiguous() && rank_meta.size(0) > kSize,
      "rank_meta must be that of a layout from cp_partition, contiguous int32 on the CPU, got ",
      dtype_name(rank_meta.scalar_type()), " ", rank_meta.sizes(), " on ", rank_meta.device());
  const auto* data = rank_meta.const_data_ptr<int32_t>();
  std::vector<int64_t> numbers(data, data + rank_meta.size(0));
  const int64_t ranks = numbers[static_cast<size_t>(RankMetaSlot::kCpSize)];
  TORCH_CHECK_VALUE(rank_meta.size(0) == kSize + 2 * ranks,
                    "rank_meta must have two numbers for each of its ", ranks,
                    " ranks at its end, got shape ", rank_meta.sizes());
  return numbers;
}

// Check offsets on the host: they ascend from `first` to `last`, or at most to it if it is a bound.
// Return the last one.
int64_t check_ascending(const Tensor& offsets, int64_t first, int64_t last, bool is_bound) {
  const auto* values = offsets.const_data_ptr<int32_t>();
  const int64_t size = offsets.size(0);
  const int64_t end = values[size - 1];
  TORCH_CHECK_VALUE(values[0] == first && (is_bound ? end <= last : end == last) &&
                        std::is_sorted(values, values + size),
                    "rank_rows must be of the same layout as rank_meta, got offsets that do not "
                    "ascend from ",
                    first, " to ", last);
  return end;
}

}  // namespace

RankShare RankShare::of(const Tensor& rank_rows, const Tensor& rank_meta, std::string group,
                        const Tensor& q) {
  RankShare share;
  share.rows_ = rank_rows;
  share.numbers_ = numbers_of(rank_meta);
  share.group_ = std::move(group);
  TORCH_CHECK_VALUE(rank_rows.scalar_type() == at::kInt && rank_rows.dim() == 1 &&
                        rank_rows.is_contiguous() && rank_rows.device() == q.device(),
                    "rank_rows must be a contiguous int32 vector on q's device, ", q.device(),
                    ", got ", dtype_name(rank_rows.scalar_type()), " ", rank_rows.sizes(), " on ",
                    rank_rows.device());
  const auto is_within = [&](RankMetaSlot number, int64_t limit) {
    return 0 <= share.at(number) && share.at(number) <= limit;
  };
  const int64_t keys = share.at(RankMetaSlot::kKeyCapacity);
  const int64_t sent = share.at(RankMetaSlot::kSendCapacity);
  const int64_t sources = share.at(RankMetaSlot::kSourceCapacity);
  const bool has_room =
      std::min({keys, sent, sources}) >= 0 && share.at(RankMetaSlot::kPieceCapacity) >= 0 &&
      share.terms_begin() + sources + 1 + keys + sent == rank_rows.size(0) &&
      is_within(RankMetaSlot::kNumPieces, share.at(RankMetaSlot::kPieceCapacity)) &&
      is_within(RankMetaSlot::kNumCut, share.at(RankMetaSlot::kNumPieces)) &&
      is_within(RankMetaSlot::kNumKeyRows, keys) && is_within(RankMetaSlot::kNumSentRows, sent) &&
      is_within(RankMetaSlot::kNumFarRows, sources - share.at(RankMetaSlot::kNumCutTokens)) &&
      is_within(RankMetaSlot::kNumCutTokens, share.at(RankMetaSlot::kNumTokens));
  TORCH_CHECK_VALUE(has_room, "rank_rows must be of the same layout as rank_meta, got shape ",
                    rank_rows.sizes());
  TORCH_CHECK_VALUE(!share.saves_far_rows() || share.is_ulysses() ||
                        share.at(RankMetaSlot::kNumFarRows) <= q.size(0) / kTokensPerKeptRow,
                    "q must have the tokens of the rank's part of a row, ",
                    share.at(RankMetaSlot::kRowTokens), ", got ", q.size(0));
  const auto sum_to = [](const std::vector<int64_t>& rows, int64_t total) {
    return std::ranges::all_of(rows, [](int64_t count) { return count >= 0; }) &&
           std::accumulate(rows.begin(), rows.end(), int64_t{0}) == total;
  };
  TORCH_CHECK_VALUE(sum_to(share.sent(), share.at(RankMetaSlot::kNumSentRows)) &&
                        sum_to(share.received(), share.at(RankMetaSlot::kNumFarRows)),
                    "rank_meta must be that of a layout from cp_partition, got numbers of rows "
                    "sent and received that do not add up");
  const int64_t any_far = share.at(RankMetaSlot::kAnyFar);
  TORCH_CHECK_VALUE(any_far == 0 || (any_far == 1 && share.at(RankMetaSlot::kCpSize) > 1),
                    "rank_meta must be that of a layout from cp_partition, got ", any_far,
                    " for whether any of ", share.at(RankMetaSlot::kCpSize),
                    " ranks receives rows");
  const int64_t held = share.at(RankMetaSlot::kRowTokens);
  const int64_t row = share.is_ulysses() ? share.at(RankMetaSlot::kCpSize) * held : q.size(0);
  TORCH_CHECK_VALUE(share.at(RankMetaSlot::kNumTokens) <= row,
                    "q must have at least the tokens of the rank's pieces, ",
                    share.at(RankMetaSlot::kNumTokens), ", got ", row);
  if (!rank_rows.is_cpu()) return share;
  const bool are_bounds = share.is_of_replays();
  const int64_t cut = check_ascending(share.cut_queries().offsets, 0,
                                      share.at(RankMetaSlot::kNumCutTokens), are_bounds);
  check_ascending(share.cut_keys().offsets, 0, share.at(RankMetaSlot::kNumKeyRows), are_bounds);
  check_ascending(share.whole_queries().offsets, cut, share.at(RankMetaSlot::kNumTokens),
                  are_bounds);
  return share;
}

Sequences RankShare::sequences(int64_t begin, int64_t count, int64_t longest,
                               int64_t tokens) const {
  Sequences sequences;
  sequences.offsets = section(begin, count + 1);
  sequences.cu_seqlens = rows_;
  sequences.first = begin;
  sequences.longest = longest;
  if (!is_of_replays()) sequences.num_real_tokens = tokens;
  return sequences;
}

Sequences RankShare::cut_queries() const {
  return sequences(0, at(RankMetaSlot::kNumCut), at(RankMetaSlot::kLongestCut),
                   at(RankMetaSlot::kNumCutTokens));
}

Sequences RankShare::cut_keys() const {
  return sequences(at(RankMetaSlot::kPieceCapacity) + 1, at(RankMetaSlot::kNumCut),
                   at(RankMetaSlot::kLongestKeys), at(RankMetaSlot::kNumKeyRows));
}

Sequences RankShare::whole_queries() const {
  const int64_t cut = at(RankMetaSlot::kNumCut);
  return sequences(cut, at(RankMetaSlot::kNumPieces) - cut, at(RankMetaSlot::kLongestWhole),
                   at(RankMetaSlot::kNumTokens));
}

Tensor RankShare::key_sources() const {
  return section(keys_begin(), at(RankMetaSlot::kNumKeyRows));
}

Tensor RankShare::sent_sources() const {
  return section(sent_begin(), at(RankMetaSlot::kNumSentRows));
}

Tensor RankShare::term_offsets(int64_t first, int64_t count) const {
  return section(terms_begin() + first, count + 1);
}

Tensor RankShare::terms() const {
  return section(terms_begin() + at(RankMetaSlot::kSourceCapacity) + 1,
                 at(RankMetaSlot::kNumKeyRows) + at(RankMetaSlot::kNumSentRows));
}

int64_t RankShare::pairs() const {
  const auto lengths = [](const Sequences& pieces) { return pieces.offsets.diff().to(at::kLong); };
  const Tensor queries = lengths(cut_queries());
  const Tensor whole = lengths(whole_queries());
  const Tensor keys = lengths(cut_keys());
  const auto all = queries.mul(keys).sum().add(whole.mul(whole).sum()).item<int64_t>();
  return at(RankMetaSlot::kUlysses) != 0 ? all / at(RankMetaSlot::kCpSize) : all;
}

void RankShare::check_options(bool causal, OptionalInt window, bool has_spans) const {
  if (at(RankMetaSlot::kUlysses) != 0) return;
  TORCH_CHECK_VALUE(!has_spans,
                    "spans must be None for a rank's part of a row: its plan moves the keys before "
                    "a token only; cp_plan(policy=\"ulysses\") serves spans");
  if (at(RankMetaSlot::kCpSize) == 1) return;
  TORCH_CHECK_VALUE(causal,
                    "causal must be True for a rank's part of a row, got False: its plan moves the "
                    "keys before a token only; cp_plan(policy=\"ulysses\") serves both");
  const int64_t planned = at(RankMetaSlot::kWindow);
  TORCH_CHECK_VALUE(planned == 0 || (window.has_value() && *window <= planned),
                    "window must be at most the plan's, ", planned, ", got ",
                    window.has_value() ? std::to_string(*window) : "None",
                    ": give cp_plan the largest window of all layers, or None");
}

std::vector<int64_t> RankShare::per_rank(int64_t first) const {
  const auto begin = numbers_.begin() + kSize + first;
  return {begin, begin + at(RankMetaSlot::kCpSize)};
}

}  // namespace cuseq::attention
