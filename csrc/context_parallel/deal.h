#pragma once

#include <cstdint>
#include <vector>

#include "cuseq/macros.h"

// Context parallelism deals the tokens of a packed row to ranks. Everything here is integer
// arithmetic on lengths, without torch, so that every rank computes the same deal.
//
// Worked example, lengths [2, 6] and a tail of 2 over 2 ranks of 5 tokens each, dealt contiguously:
//   rank 0: tokens [0, 3) of document 1, then document 0
//   rank 1: tokens [3, 6) of document 1, then the tail
namespace cuseq::cp {

// A packed row. The last segment is the tail: a document of length 0 and its padding.
struct Row {
  std::vector<int64_t> lengths;   // tokens of each document
  std::vector<int64_t> segments;  // tokens of each document and of the padding after it
  int64_t total_tokens = 0;       // sum of the segments

  int64_t size() const { return static_cast<int64_t>(lengths.size()); }
};

// Tokens [begin, end) of a segment.
struct Piece {
  int32_t segment;
  int32_t begin;
  int32_t end;

  int64_t size() const { return end - begin; }
  bool operator==(const Piece&) const = default;
};

using Pieces = std::vector<Piece>;

// The pieces of each rank, in the rank's order. The pieces of one document on one rank are
// neighbours in ascending order and do not touch.
using Deal = std::vector<Pieces>;

// Return the part of a piece that is not padding; it may be empty.
inline Piece real_part(const Row& row, const Piece& piece) {
  const auto length = static_cast<int32_t>(row.lengths[piece.segment]);
  const int32_t begin = piece.begin < length ? piece.begin : length;
  return {piece.segment, begin, piece.end < length ? piece.end : length};
}

inline bool is_whole(const Row& row, const Piece& real) {
  return real.begin == 0 && real.end == row.lengths[real.segment];
}

// Append a piece, or lengthen the last one if it ends where this one begins.
void append(Pieces& pieces, const Piece& piece);

// Cut each segment into 2 * cp_size equal parts; rank r holds the parts r and 2 * cp_size - 1 - r.
// Segments must be multiples of 2 * cp_size.
CUSEQ_API Deal deal_zigzag(const Row& row, int64_t cp_size);

// Cut the documents, one after the other, every total_tokens / cp_size tokens. Padding and tail
// follow the last document. A rank holds the pieces of cut documents first.
CUSEQ_API Deal deal_contiguous(const Row& row, int64_t cp_size);

// Cut the row as it is, padding included, every total_tokens / cp_size tokens.
CUSEQ_API Deal deal_in_order(const Row& row, int64_t cp_size);

// Distribute padding and tail over the free places of the ranks, in the order of the row.
void fill_with_padding(const Row& row, int64_t tokens_per_rank, Deal& deal);

// Move the pieces of cut documents to the front of each rank; padding stays at the end.
void put_cut_first(const Row& row, Deal& deal);

}  // namespace cuseq::cp
