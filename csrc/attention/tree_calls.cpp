#include "attention/tree_calls.h"

#include <algorithm>

#include "cuseq/cache.h"
#include "ops/checks.h"
#include "ops/dtype_name.h"
#include "trees/tree_meta.h"

namespace cuseq::attention {
namespace {

void check_options(const AttentionOptions& options) {
  TORCH_CHECK_VALUE(options.causal, "causal must be True for a tree: a token sees its path");
  TORCH_CHECK_VALUE(!options.spans.has_value(), "spans must be None for a tree");
  TORCH_CHECK_VALUE(!options.cu_seqlens_padded.has_value(),
                    "packed must have no padding between the nodes of a tree");
}

// tree_meta, with the sections of tree_rows.
class Meta {
 public:
  Meta(const Tensor& q, const Tensor& rows, const Tensor& meta) : rows_(rows) {
    TORCH_CHECK_VALUE(meta.is_cpu() && meta.scalar_type() == at::kInt && meta.dim() == 1 &&
                          meta.is_contiguous() && meta.size(0) >= kTreeMetaHead,
                      "tree_meta must be the contiguous int32 vector on the CPU of a PackedTree's "
                      "layout, got ",
                      dtype_name(meta.scalar_type()), " ", meta.sizes(), " on ", meta.device());
    TORCH_CHECK_VALUE(rows.scalar_type() == at::kInt && rows.dim() == 1 && rows.is_contiguous() &&
                          rows.device() == q.device(),
                      "tree_rows must be a contiguous int32 vector on q's device, ", q.device(),
                      ", got ", dtype_name(rows.scalar_type()), " ", rows.sizes(), " on ",
                      rows.device());
    numbers_ = meta.const_data_ptr<int32_t>();
    const bool fits = nodes() >= 0 && offsets() >= 0 && depth() >= 0 && depth() <= max_depth() &&
                      meta.size(0) == kTreeMetaHead + max_depth() * kTreeCallSize &&
                      rows.size(0) == nodes() + 2 * offsets();
    TORCH_CHECK_VALUE(fits, "tree_meta must be of the layout of tree_rows, got sizes ",
                      meta.sizes(), " and ", rows.sizes());
  }

  int64_t depth() const { return numbers_[kTreeDepth]; }
  int64_t longest_path() const { return numbers_[kTreeLongestPath]; }
  int64_t nodes() const { return numbers_[kTreeNodeCapacity]; }
  int64_t offsets() const { return numbers_[kTreeOffsetsCapacity]; }
  int64_t max_depth() const { return numbers_[kTreeMaxDepth]; }

  // Return call number d, or none if it computes nothing.
  std::optional<TreeCall> call(int64_t d, int64_t total_tokens) const {
    const int32_t* call = numbers_ + kTreeMetaHead + d * kTreeCallSize;
    const int64_t pairs = call[kCallPairs];
    if (pairs == 0) return std::nullopt;
    const int64_t first = call[kCallFirst];
    TORCH_CHECK_VALUE(pairs > 0 && first >= 0 && first + pairs < offsets(),
                      "tree_meta must name offsets inside tree_rows, got ", pairs + 1, " from ",
                      first, " of ", offsets());
    const auto sequences = [&](int64_t section, int64_t longest, int64_t end) {
      TORCH_CHECK_VALUE(0 <= end && end <= total_tokens && 0 <= longest && longest <= end,
                        "tree_meta must name rows of the ", total_tokens, " tokens, got an end of ",
                        end, " and a longest pair of ", longest);
      Sequences one;
      one.cu_seqlens = rows_;
      one.first = section + first;
      one.offsets = rows_.narrow(0, one.first, pairs + 1);
      one.longest = longest;
      one.num_real_tokens = end;
      if (rows_.is_cpu()) check_pairs(one.offsets, end);
      return one;
    };
    return TreeCall{sequences(nodes(), call[kCallLongestQuery], call[kCallQueryEnd]),
                    sequences(nodes() + offsets(), call[kCallLongestKeys], call[kCallKeyEnd]),
                    call[kCallQueryEnd], call[kCallKeyEnd]};
  }

  // Return the one call of trees whose nodes have at most one ancestor, without reading numbers
  // that differ between trees.
  TreeCall captured_call(int64_t total_tokens, int64_t longest) const {
    const auto sequences = [&](int64_t section) {
      Sequences one;
      // The unused end of a section is zero, but offsets must not fall: repeat the last one.
      one.offsets = std::get<0>(rows_.narrow(0, section, offsets()).cummax(0));
      one.cu_seqlens = one.offsets;
      one.longest = longest;
      return one;
    };
    return {sequences(nodes()), sequences(nodes() + offsets()), total_tokens, total_tokens};
  }

 private:
  static void check_pairs(const Tensor& offsets, int64_t end) {
    const auto* values = offsets.const_data_ptr<int32_t>();
    const int64_t count = offsets.size(0);
    TORCH_CHECK_VALUE(
        values[0] >= 0 && values[count - 1] == end && std::is_sorted(values, values + count),
        "tree_rows must hold offsets that ascend to ", end, ", got ", values[count - 1]);
  }

  const Tensor& rows_;
  const int32_t* numbers_;
};

}  // namespace

std::optional<TreeCalls> tree_calls_of(const Tensor& q, const AttentionOptions& options,
                                       OptionalInt longest_bound) {
  TORCH_CHECK_VALUE(options.tree_rows.has_value() == options.tree_meta.has_value(),
                    "tree_rows and tree_meta must be given together");
  if (!options.tree_rows.has_value()) return std::nullopt;
  check_options(options);
  const int64_t total_tokens = q.size(0);
  const Meta meta(q, *options.tree_rows, *options.tree_meta);
  const bool captured = is_capturing(q);
  const int64_t longest_path = captured ? total_tokens : meta.longest_path();
  TORCH_CHECK_VALUE(options.window.value_or(longest_path) >= longest_path,
                    "window must be None or at least the longest path of the tree, ", longest_path,
                    " tokens, since flash attention's windows count tokens of the row, got ",
                    options.window.value_or(0),
                    ": use packed.block_mask or packed.dense_mask, which count along the path");
  TreeCalls calls;
  if (captured) {
    TORCH_CHECK_VALUE(meta.max_depth() <= 1,
                      "max_depth must be 1 for a tree in a CUDA graph capture, got ",
                      meta.max_depth());
    if (meta.offsets() > 1 && meta.max_depth() == 1) {
      calls.push_back(meta.captured_call(
          total_tokens, std::min(longest_bound.value_or(total_tokens), total_tokens)));
    }
    return calls;
  }
  for (int64_t d = 0; d < meta.depth(); ++d) {
    if (auto call = meta.call(d, total_tokens)) calls.push_back(*std::move(call));
  }
  return calls;
}

}  // namespace cuseq::attention
