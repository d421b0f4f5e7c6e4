#pragma once

#include <cstdint>

#include "cuseq/macros.h"
#include "cuseq/seqlens.h"

// The keys that each token may attend to, in closed form, without torch. They are always
// contiguous, so every mask is two numbers per token.
//
// Worked example, lengths [2, 3] in a row of 6 tokens, causal:
//   token   0 1 2 3 4 5
//   first   0 0 2 2 2 5   <- the tail sees only itself
//   end     1 2 3 4 5 6
namespace cuseq {

// The keys [first, end) of the flat row.
struct KeyRange {
  int64_t first;
  int64_t end;
};

struct MaskRule {
  Segments segments{};
  bool causal = true;
  int64_t window = 0;              // keys that a token sees, including itself; 0: all
  const int32_t* spans = nullptr;  // [n_spans, 2]: start and end, ascending, disjoint or the same
  int64_t n_spans = 0;

  // Return the keys of a token in `segment`. `span` is the last span that starts at or before the
  // token, or -1 if none does. Tokens of the tail and of padding see only themselves. The tokens of
  // a span see the whole span regardless of `causal` and `window`, but never another sequence.
  CUSEQ_HOST_DEVICE KeyRange keys_of(int64_t token, int64_t segment, int64_t span) const {
    const KeyRange alone{token, token + 1};
    if (!segments.is_real(token, segment)) return alone;
    const int64_t offset = segments.seqlens.begin(segment);
    const int64_t begin = offset > 0 ? offset : 0;
    const int64_t end = segments.real_end(segment);
    KeyRange keys{begin, causal ? token + 1 : end};
    if (window > 0) {
      if (token - window + 1 > keys.first) keys.first = token - window + 1;
      if (token + window < keys.end) keys.end = token + window;
    }
    if (span >= 0 && token < spans[2 * span + 1]) {
      const int64_t span_begin = spans[2 * span] > begin ? spans[2 * span] : begin;
      const int64_t span_end = spans[2 * span + 1] < end ? spans[2 * span + 1] : end;
      if (span_begin < keys.first) keys.first = span_begin;
      if (span_end > keys.end) keys.end = span_end;
    }
    return keys;
  }

  CUSEQ_HOST_DEVICE KeyRange keys_of(int64_t token, int64_t segment) const {
    return keys_of(token, segment, span_before(token));
  }

  CUSEQ_HOST_DEVICE int64_t span_before(int64_t token) const {
    int64_t low = -1;
    int64_t high = n_spans - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (spans[2 * middle] <= token) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// Blocks of `block` keys that a block of queries sees: [first, end) at least partly, and of these
// [full_first, full_end) completely. Both ranges are contiguous because each token's keys include
// the token itself.
struct BlockRange {
  int64_t first;
  int64_t end;
  int64_t full_first;
  int64_t full_end;

  // Compute the range from bounds over the block's queries: `any` is [least first, greatest end),
  // `all` is [greatest first, least end).
  CUSEQ_HOST_DEVICE static BlockRange of(KeyRange any, KeyRange all, int64_t block) {
    BlockRange range{any.first / block, ceil_div(any.end, block), ceil_div(all.first, block),
                     all.end / block};
    if (range.full_end < range.full_first) range.full_end = range.full_first;
    return range;
  }

  CUSEQ_HOST_DEVICE bool sees(int64_t block) const { return first <= block && block < end; }
  CUSEQ_HOST_DEVICE bool sees_all(int64_t block) const {
    return full_first <= block && block < full_end;
  }
};

}  // namespace cuseq
