#include "context_parallel/cost.h"

#include <algorithm>

#include "cuseq/seqlens.h"

namespace cuseq::cp {
namespace {

constexpr int64_t kQueryTile = 128;
constexpr int64_t kKeyTile = 64;
// Copying a row next to the other keys of its piece costs a tenth of receiving it: HBM against
// NVLink, read and write.
constexpr int64_t kCopiesPerTransfer = 10;
// An eighth of an exchange shows even where attention runs meanwhile: rows are gathered first, and
// both share the memory.
constexpr int64_t kNeverHidden = 8;

// Return the pairs of the first `tokens` queries of a document.
int64_t pairs_before(int64_t tokens, int64_t window) {
  if (window == 0 || tokens <= window) return tokens * (tokens + 1) / 2;
  return window * (window + 1) / 2 + (tokens - window) * window;
}

}  // namespace

CostModel CostModel::of_heads(int64_t heads, int64_t key_heads, int64_t window) {
  // 12 * key_heads * head_dim bytes / 300 GB/s over 14 * heads * head_dim operations / 300 TFLOP/s
  return {window, std::max<int64_t>(1, 6000 * key_heads / (7 * heads))};
}

int64_t pairs_of(int64_t begin, int64_t end, int64_t window) {
  return pairs_before(end, window) - pairs_before(begin, window);
}

int64_t tiled_pairs_of(int64_t begin, int64_t end, int64_t window) {
  if (begin == end) return 0;
  const int64_t full = (end - begin) / kQueryTile;
  const int64_t tiles = ceil_div(end - begin, kQueryTile);
  // Query tile i ends at begin + 128 * (i + 1), which is a multiple of 64 after begin.
  int64_t count = full * ceil_div(begin, kKeyTile) + full * (full + 1);
  if (tiles > full) count += ceil_div(end, kKeyTile);
  if (window > 0 && end >= window) {
    // Tile i skips floor((begin + 128 * i - window + 1) / 64) key tiles, where that is positive.
    const int64_t before = begin - window + 1;
    const int64_t skipped = before >= 0 ? before / kKeyTile : -ceil_div(-before, kKeyTile);
    const int64_t first = skipped >= 0 ? 0 : ceil_div(-skipped, 2);
    if (first < tiles) {
      count -= (tiles - first) * skipped + tiles * (tiles - 1) - first * (first - 1);
    }
  }
  return count * kQueryTile * kKeyTile;
}

std::vector<Work> work_of_documents(const Row& row, int64_t window) {
  std::vector<Work> work;
  work.reserve(row.lengths.size());
  for (const int64_t length : row.lengths) {
    work.push_back({pairs_of(0, length, window), tiled_pairs_of(0, length, window)});
  }
  return work;
}

Costs exchange_costs(const Row& row, const std::vector<Work>& work, const Deal& deal,
                     const CostModel& model) {
  Costs costs;
  for (const Pieces& pieces : deal) {
    int64_t pairs = 0, whole = 0, cut = 0, far_rows = 0, key_rows = 0;
    int32_t document = -1;
    int64_t seen = 0;  // keys of `document` up to here are counted
    for (const Piece& piece : pieces) {
      const Piece real = real_part(row, piece);
      if (real.begin == real.end) continue;
      if (is_whole(row, real)) {
        pairs += work[real.segment].pairs;
        whole += work[real.segment].tiled_pairs;
        continue;
      }
      pairs += pairs_of(real.begin, real.end, model.window);
      cut += tiled_pairs_of(real.begin, real.end, model.window);
      if (real.segment != document) seen = 0;
      document = real.segment;
      const int64_t first = first_key(real.begin, model.window);
      key_rows += real.end - first;
      far_rows += real.begin - std::min<int64_t>(real.begin, std::max(first, seen));
      seen = real.end;
    }
    const int64_t exchange = far_rows * model.row_cost;
    const int64_t copies = key_rows * model.row_cost / kCopiesPerTransfer;
    const int64_t shown = exchange / kNeverHidden;  // even under attention
    costs.pairs += pairs;
    costs.max_pairs = std::max(costs.max_pairs, pairs);
    costs.far_rows += far_rows;
    costs.max_far_rows = std::max(costs.max_far_rows, far_rows);
    costs.time = std::max(costs.time, std::max(whole, exchange) + shown + cut + copies);
  }
  return costs;
}

Costs ulysses_costs(const Row& row, const std::vector<Work>& work, int64_t cp_size, int64_t heads,
                    int64_t key_heads, const CostModel& model) {
  Costs costs;
  int64_t tiled = 0;
  for (const Work& document : work) {
    costs.pairs += document.pairs;
    tiled += document.tiled_pairs;
  }
  costs.max_pairs = ceil_div(costs.pairs, cp_size);
  // Each rank receives its heads of q, k and v for the tokens of others, and returns their outputs.
  // Key heads are repeated if there are more ranks.
  const int64_t own = row.total_tokens / cp_size;
  const int64_t moved = heads + std::max(key_heads, cp_size);
  costs.max_far_rows = ceil_div((row.total_tokens - own) * moved, cp_size * key_heads);
  costs.far_rows = costs.max_far_rows * cp_size;
  costs.time = ceil_div(tiled, cp_size) + costs.max_far_rows * model.row_cost;
  return costs;
}

}  // namespace cuseq::cp
