#include "context_parallel/deal.h"

#include <algorithm>

#include "cuseq/seqlens.h"

namespace cuseq::cp {
namespace {

// Cut the first `tokens[i]` tokens of each segment i, one segment after the other, every
// total_tokens / cp_size tokens.
Deal cut_evenly(const Row& row, const std::vector<int64_t>& tokens, int64_t cp_size) {
  const int64_t own = row.total_tokens / cp_size;
  Deal deal(cp_size);
  int64_t placed = 0;
  for (int64_t segment = 0; segment < row.size(); ++segment) {
    for (int64_t begin = 0; begin < tokens[segment];) {
      const int64_t rank = placed / own;
      const int64_t end = std::min(tokens[segment], begin + (rank + 1) * own - placed);
      append(deal[rank], {static_cast<int32_t>(segment), static_cast<int32_t>(begin),
                          static_cast<int32_t>(end)});
      placed += end - begin;
      begin = end;
    }
  }
  return deal;
}

}  // namespace

void append(Pieces& pieces, const Piece& piece) {
  if (piece.begin == piece.end) return;
  if (!pieces.empty() && pieces.back().segment == piece.segment &&
      pieces.back().end == piece.begin) {
    pieces.back().end = piece.end;
  } else {
    pieces.push_back(piece);
  }
}

Deal deal_zigzag(const Row& row, int64_t cp_size) {
  Deal deal(cp_size);
  for (int64_t segment = 0; segment < row.size(); ++segment) {
    const int64_t part = row.segments[segment] / (2 * cp_size);
    for (int64_t rank = 0; rank < cp_size; ++rank) {
      for (const int64_t number : {rank, 2 * cp_size - 1 - rank}) {
        append(deal[rank], {static_cast<int32_t>(segment), static_cast<int32_t>(number * part),
                            static_cast<int32_t>((number + 1) * part)});
      }
    }
  }
  return deal;
}

Deal deal_contiguous(const Row& row, int64_t cp_size) {
  Deal deal = cut_evenly(row, row.lengths, cp_size);
  put_cut_first(row, deal);
  fill_with_padding(row, row.total_tokens / cp_size, deal);
  return deal;
}

Deal deal_in_order(const Row& row, int64_t cp_size) {
  return cut_evenly(row, row.segments, cp_size);
}

void fill_with_padding(const Row& row, int64_t tokens_per_rank, Deal& deal) {
  std::vector<int64_t> room(deal.size(), tokens_per_rank);
  for (size_t rank = 0; rank < deal.size(); ++rank) {
    for (const Piece& piece : deal[rank]) room[rank] -= piece.size();
  }
  size_t rank = 0;
  for (int64_t segment = 0; segment < row.size(); ++segment) {
    for (int64_t begin = row.lengths[segment]; begin < row.segments[segment];) {
      while (room[rank] == 0) ++rank;
      const int64_t end = std::min(row.segments[segment], begin + room[rank]);
      // Not appended: a document must not look longer than it is.
      deal[rank].push_back(
          {static_cast<int32_t>(segment), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
      room[rank] -= end - begin;
      begin = end;
    }
  }
}

void put_cut_first(const Row& row, Deal& deal) {
  for (Pieces& pieces : deal) {
    std::stable_partition(pieces.begin(), pieces.end(),
                          [&](const Piece& piece) { return !is_whole(row, piece); });
  }
}

}  // namespace cuseq::cp
