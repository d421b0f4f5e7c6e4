#pragma once

#include <cstdint>

#include "cuseq/macros.h"

// All arithmetic on offsets, without torch, so that the CPU code, the CUDA kernels and the unit
// tests share one implementation.
//
// Worked example, lengths [2, 3] in a row of 6 tokens:
//   cu_seqlens    0 2 5
//   token         0 1 2 3 4 5
//   sequence      0 0 1 1 1 2   <- the tail is segment number n_seqs
//   position      0 1 0 1 2 0
namespace cuseq {

// Return the length clamped to [0, limit + 1], so that sums of up to 2^31 lengths cannot overflow
// 64 bits.
CUSEQ_HOST_DEVICE int64_t bounded_length(int64_t length, int64_t limit) {
  return length < 0 ? 0 : (length > limit ? limit + 1 : length);
}

CUSEQ_HOST_DEVICE int32_t bounded_offset(int64_t offset, int64_t limit) {
  return static_cast<int32_t>(offset > limit ? limit : offset);
}

CUSEQ_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

CUSEQ_HOST_DEVICE int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Return the length of a sequence's segment. Most rows have no padding between sequences, and a
// division of 64 bits is slow on a GPU.
CUSEQ_HOST_DEVICE int64_t segment_length(int64_t length, int64_t multiple) {
  return multiple == 1 ? length : round_up(length, multiple);
}

CUSEQ_HOST_DEVICE int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Divide token counts in 32 bits, which they fit in: GPUs do so several times faster than in 64.
CUSEQ_HOST_DEVICE int64_t divide_tokens(int64_t tokens, int64_t divisor) {
  return static_cast<uint32_t>(tokens) / static_cast<uint32_t>(divisor);
}

// Return the position in the whole segment of a rank's token number `index`. Context parallelism
// cuts a segment into 2 * cp_size equal parts and gives rank r the parts r and 2 * cp_size - 1 - r,
// so that causal attention costs every rank the same.
//
// Worked example, length 8 over 2 ranks: rank 0 holds positions 0 1 6 7, rank 1 holds 2 3 4 5.
CUSEQ_HOST_DEVICE int64_t zigzag_position(int64_t index, int64_t length, int64_t cp_size,
                                          int64_t cp_rank) {
  const int64_t part = divide_tokens(length, 2 * cp_size);
  return index < part ? cp_rank * part + index : (2 * cp_size - 2 - cp_rank) * part + index;
}

// Offsets of the sequences of one packed row: a view that owns no memory.
struct SeqLens {
  const int32_t* cu_seqlens;  // [n_seqs + 1]
  int64_t n_seqs;

  // Return the segment of `token`: the last one that starts at or before it. Empty sequences
  // therefore own no token, and tokens after the last offset, the tail, get n_seqs. Searches [low,
  // high], which must contain the answer.
  CUSEQ_HOST_DEVICE int64_t segment_of(int64_t token, int64_t low, int64_t high) const {
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (cu_seqlens[middle] <= token) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  CUSEQ_HOST_DEVICE int64_t segment_of(int64_t token) const { return segment_of(token, 0, n_seqs); }

  CUSEQ_HOST_DEVICE int64_t begin(int64_t segment) const { return cu_seqlens[segment]; }

  // Return the offset at which the tail begins.
  CUSEQ_HOST_DEVICE int64_t tail_begin() const { return cu_seqlens[n_seqs]; }
};

// The segments of a row. A segment may be longer than its sequence; the rest of it is padding.
struct Segments {
  SeqLens seqlens{};                         // offsets of the segments in memory
  const int32_t* cu_seqlens_real = nullptr;  // offsets of the real tokens; null: no padding
  int64_t total_tokens = 0;

  // Return the end of a segment's real tokens, clamped to the segment and to the row whatever the
  // offsets hold.
  CUSEQ_HOST_DEVICE int64_t real_end(int64_t segment) const {
    int64_t end = seqlens.begin(segment + 1);
    if (end > total_tokens) end = total_tokens;
    if (cu_seqlens_real == nullptr) return end;
    const int64_t real = seqlens.begin(segment) + cu_seqlens_real[segment + 1] -
                         static_cast<int64_t>(cu_seqlens_real[segment]);
    return real < end ? real : end;
  }

  CUSEQ_HOST_DEVICE bool is_real(int64_t token, int64_t segment) const {
    return segment < seqlens.n_seqs && token >= seqlens.begin(segment) && token < real_end(segment);
  }

  // Return the place of the real token number `rank`, or -1 if there are fewer tokens.
  CUSEQ_HOST_DEVICE int64_t place_of(int64_t rank) const {
    const SeqLens real{cu_seqlens_real, seqlens.n_seqs};
    const int64_t segment = real.segment_of(rank);
    if (segment >= seqlens.n_seqs || rank < real.begin(segment)) return -1;
    const int64_t place = seqlens.begin(segment) + rank - real.begin(segment);
    return place >= 0 && is_real(place, segment) ? place : -1;
  }

  // Return the rank of a token among the real tokens, or -1 if it is not real.
  CUSEQ_HOST_DEVICE int64_t rank_of(int64_t token) const {
    const int64_t segment = seqlens.segment_of(token);
    if (!is_real(token, segment)) return -1;
    return cu_seqlens_real[segment] + token - seqlens.begin(segment);
  }

  // Return whether the label of a token would need a prediction across a boundary. With shift 0 the
  // label is the token itself, and the first token of a sequence has no predecessor. With shift k
  // the label is the token k places later, which the last k tokens of a sequence do not have.
  // Padding and tail never carry a label.
  CUSEQ_HOST_DEVICE bool label_crosses_boundary(int64_t token, int64_t shift) const {
    const int64_t segment = seqlens.segment_of(token);
    if (!is_real(token, segment)) return true;
    if (shift == 0) return token == seqlens.begin(segment);
    return shift >= real_end(segment) - token;  // not token + shift, which could overflow
  }
};

// Return whether a new sequence starts between two neighbouring positions. Text positions step by
// exactly one inside a sequence. A plane of multimodal positions repeats a value inside an image
// and jumps after it, so only a decrease, or two zeros in a row, is a restart.
CUSEQ_HOST_DEVICE bool position_restarts(int64_t previous, int64_t current, bool is_plane) {
  if (is_plane) {
    return current < previous || (current == 0 && previous == 0);
  }
  // Device positions are unchecked and may be INT64_MAX, whose successor would overflow.
  return previous == INT64_MAX || current != previous + 1;
}

}  // namespace cuseq
