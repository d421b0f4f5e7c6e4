#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "context_parallel/share.h"
#include "ops/host_values.h"
#include "ops/types.h"
#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

// rank_meta is int32 and counts each row as a key of up to two pieces.
constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr int64_t kMaxRanks = 1 << 16;

std::vector<int64_t> values_of(const Tensor& lengths) {
  const Tensor values = host_values(lengths);
  const auto* data = values.const_data_ptr<int64_t>();
  return {data, data + values.numel()};
}

// Return the lengths that are not zero.
std::vector<int64_t> tokens_of_each(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> found;
  std::copy_if(lengths.begin(), lengths.end(), std::back_inserter(found),
               [](int64_t length) { return length > 0; });
  return found;
}

// Return the row; the values of both tensors must be valid.
cp::Row row_of(const Tensor& lengths, const OptionalTensor& segments, int64_t total_tokens) {
  cp::Row row;
  row.lengths = values_of(lengths);
  row.segments = segments.has_value() ? values_of(*segments) : row.lengths;
  row.total_tokens = total_tokens;
  int64_t tail = total_tokens;
  for (const int64_t length : row.segments) tail -= length;
  row.lengths.push_back(0);
  row.segments.push_back(tail);
  return row;
}

void check_row(const Tensor& lengths, const OptionalTensor& segments, int64_t total_tokens) {
  check_host_vector(lengths, "lengths");
  const int64_t real = tokens_of(lengths, /*is_cu_seqlens=*/false);
  int64_t tokens = real;
  if (segments.has_value()) {
    check_host_vector(*segments, "segments");
    tokens = tokens_of(*segments, /*is_cu_seqlens=*/false);
    TORCH_CHECK_VALUE(segments->numel() == lengths.numel(),
                      "segments must have as many entries as lengths, ", lengths.numel(), ", got ",
                      segments->numel());
    TORCH_CHECK_VALUE(segments->ge(lengths).all().item<bool>(),
                      "segments must be at least as long as their sequences");
  }
  TORCH_CHECK_VALUE(tokens <= total_tokens,
                    "lengths must sum to at most total_tokens = ", total_tokens, ", got ", tokens);
  TORCH_CHECK_VALUE(total_tokens < kMaxTokens, "total_tokens must be below 2^30 to be dealt, got ",
                    total_tokens);
}

cp::Policy policy_named(std::string_view name) {
  if (name == "auto") return cp::Policy::kAuto;
  if (name == "contiguous") return cp::Policy::kContiguous;
  if (name == "ulysses") return cp::Policy::kUlysses;
  TORCH_CHECK_VALUE(name == "zigzag",
                    "policy must be \"auto\", \"contiguous\", \"ulysses\" or \"zigzag\", got \"",
                    name, "\"");
  return cp::Policy::kZigzag;
}

void check_zigzag(const cp::Row& row, bool has_padding, int64_t cp_size) {
  const char* what = has_padding ? "segments" : "lengths";
  const int64_t parts = 2 * cp_size;
  for (int64_t i = 0; i < row.size(); ++i) {
    if (row.segments[i] % parts == 0) continue;
    const bool is_tail = i + 1 == row.size();
    const std::string name = is_tail ? "the tail" : c10::str(what, "[", i, "]");
    TORCH_CHECK_VALUE(false, what, " and tail must be multiples of ", parts,
                      ", so that every rank gets the same number of tokens, got ", name, " = ",
                      row.segments[i], ": pad them by segment_multiple and total_multiple");
  }
}

void check_ulysses(const cp::Options& options) {
  TORCH_CHECK_VALUE(options.heads % options.cp_size == 0,
                    "cp_size must divide the query heads for policy \"ulysses\", got ",
                    options.cp_size, " ranks and ", options.heads, " heads");
  TORCH_CHECK_VALUE(
      options.key_heads % options.cp_size == 0 || options.cp_size % options.key_heads == 0,
      "cp_size must divide the key heads or be a multiple of them for policy "
      "\"ulysses\", got ",
      options.cp_size, " ranks and ", options.key_heads, " key heads");
}

void check_rank(const cp::Plan& plan, int64_t rank) {
  TORCH_CHECK_VALUE(0 <= rank && rank < plan.options.cp_size,
                    "rank must lie in [0, cp_size = ", plan.options.cp_size, "), got ", rank);
}

}  // namespace

cp::Plan cp_plan(const Tensor& lengths, const OptionalTensor& segments, int64_t total_tokens,
                 std::string_view policy, cp::Options options) {
  check_row(lengths, segments, total_tokens);
  TORCH_CHECK_VALUE(1 <= options.cp_size && options.cp_size <= kMaxRanks,
                    "cp_size must lie in [1, ", kMaxRanks, "], got ", options.cp_size);
  TORCH_CHECK_VALUE(1 <= options.key_heads && options.key_heads <= options.heads &&
                        options.heads <= kMaxRanks && options.heads % options.key_heads == 0,
                    "heads must be (query heads, key heads), the former a multiple of the latter "
                    "and at most ",
                    kMaxRanks, ", got ", options.heads, " and ", options.key_heads);
  TORCH_CHECK_VALUE(options.window >= 0, "window must be at least 1, got ", options.window);
  const int64_t limit = options.max_far_rows.value_or(total_tokens);
  TORCH_CHECK_VALUE(limit >= 0, "max_far_rows must be at least 0, got ", limit);
  options.policy = policy_named(policy);
  cp::Row row = row_of(lengths, segments, total_tokens);
  if (options.policy == cp::Policy::kZigzag) {
    check_zigzag(row, segments.has_value(), options.cp_size);
  }
  TORCH_CHECK_VALUE(total_tokens % options.cp_size == 0,
                    "total_tokens must be a multiple of cp_size = ", options.cp_size,
                    ", so that every rank gets the same number of tokens, got ", total_tokens);
  if (options.policy == cp::Policy::kUlysses) check_ulysses(options);
  cp::Plan plan = cp::make_plan(std::move(row), options);
  TORCH_CHECK_VALUE(options.policy == cp::Policy::kUlysses || plan.costs.max_far_rows <= limit,
                    "max_far_rows must be at least the far keys that a rank needs, ",
                    plan.costs.max_far_rows, " by the plan that was found, got ", limit);
  return plan;
}

bool cp_plan_is_for(const cp::Plan& plan, const Tensor& lengths, const OptionalTensor& segments,
                    int64_t total_tokens) {
  if (total_tokens != plan.row.total_tokens) return false;
  const auto same = [](const std::vector<int64_t>& planned, const Tensor& given) {
    return std::vector<int64_t>(planned.begin(), planned.end() - 1) == values_of(given) ||
           tokens_of_each({planned.begin(), planned.end() - 1}) == tokens_of_each(values_of(given));
  };
  return same(plan.row.lengths, lengths) && same(plan.row.segments, segments.value_or(lengths));
}

std::tuple<Tensor, Tensor> cp_deal(const cp::Plan& plan) {
  std::vector<int32_t> tokens = plan.tokens();
  std::vector<int32_t> places(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) places[tokens[i]] = static_cast<int32_t>(i);
  return {tensor_of(std::move(tokens)), tensor_of(std::move(places))};
}

Tensor cp_pieces(const cp::Plan& plan, int64_t rank) {
  check_rank(plan, rank);
  std::vector<int32_t> numbers;
  for (const cp::Piece& piece : plan.deal[rank]) {
    numbers.insert(numbers.end(), {piece.segment, piece.begin, piece.end});
  }
  return tensor_of(std::move(numbers)).view({-1, 3});
}

std::tuple<Tensor, Tensor, Tensor> cp_share(const cp::Plan& plan, int64_t rank, int64_t max_seqs,
                                            const std::optional<RoomNumbers>& room) {
  check_rank(plan, rank);
  TORCH_CHECK_VALUE(plan.row.size() - 1 <= max_seqs, "packed must have room for the plan's ",
                    plan.row.size() - 1, " documents, got a layout of max_seqs = ", max_seqs);
  std::optional<cp::Room> of_graph;
  if (room) of_graph = {(*room)[0], (*room)[1], (*room)[2], (*room)[3], (*room)[4]};
  cp::Share share = cp::share_of(plan, rank, max_seqs, of_graph);
  return {tensor_of(plan.piece_lengths(rank)), tensor_of(std::move(share.rows)),
          tensor_of(std::move(share.meta))};
}

RoomNumbers cp_most_room(const cp::Plan& plan, int64_t max_seqs) {
  const cp::Room most = cp::most_room(plan, max_seqs);
  return {most.whole, most.cut, most.cut_tokens, most.keys, most.far};
}

}  // namespace cuseq
