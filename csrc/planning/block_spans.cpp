#include <cstdint>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

void check_rows(const Tensor& tensor, const char* name, int64_t dim) {
  check_memory(tensor, name);
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == at::kLong &&
                        tensor.is_contiguous() && tensor.dim() == dim,
                    name, " must be contiguous int64 with ", dim, " dimensions on the CPU, got ",
                    dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " on ", tensor.device());
}

}  // namespace

std::optional<std::vector<std::pair<int64_t, int64_t>>> block_spans(const Tensor& blocks,
                                                                    const Tensor& lengths,
                                                                    const Tensor& segments) {
  check_rows(blocks, "blocks", 2);
  check_rows(lengths, "lengths", 1);
  check_rows(segments, "segments", 1);
  TORCH_CHECK_VALUE(lengths.numel() == segments.numel(),
                    "segments must have one value for each of ", lengths.numel(), " lengths, got ",
                    segments.numel());
  const auto* block = blocks.const_data_ptr<int64_t>();
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* segment = segments.const_data_ptr<int64_t>();
  const int64_t row = blocks.size(1);
  std::vector<std::pair<int64_t, int64_t>> spans;
  std::unordered_set<int64_t> ended;  // blocks of this document and row
  int64_t begin = 0;
  for (int64_t i = 0; i < lengths.numel(); begin += segment[i], ++i) {
    TORCH_CHECK_VALUE(
        0 <= length[i] && length[i] <= segment[i] && segment[i] <= blocks.numel() - begin,
        "segments must hold their lengths and fit ", blocks.numel(), " tokens, got length ",
        length[i], " and segment ", segment[i], " of document ", i);
    ended.clear();
    for (int64_t token = begin; token < begin + length[i];) {
      if (token % row == 0) ended.clear();
      int64_t end = token + 1;
      while (end < begin + length[i] && end % row != 0 && block[end] == block[token]) ++end;
      if (block[token] >= 0) {
        if (!ended.insert(block[token]).second) return std::nullopt;
        if (end - token > 1) spans.emplace_back(token, end);
      }
      token = end;
    }
  }
  return spans;
}

}  // namespace cuseq
