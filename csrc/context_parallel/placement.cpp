#include "context_parallel/placement.h"

#include <algorithm>
#include <limits>

#include "cuseq/seqlens.h"
#include "packing/rows.h"

namespace cuseq::cp {

std::vector<int32_t> longest_first(const Row& row) {
  return packing::sort_descending([&](int64_t i) { return row.lengths[i]; }, row.size()).order;
}

Placement::Placement(const Row& row, const std::vector<Work>& work,
                     const std::vector<int32_t>& order, int64_t cp_size, int64_t window)
    : row_(row),
      work_(work),
      order_(order),
      window_(window),
      tokens_per_rank_(row.total_tokens / cp_size),
      ranks_(cp_size),
      free_(cp_size),
      pairs_(cp_size),
      expected_(cp_size) {
  for (const Work& document : work) all_pairs_ += document.pairs;
}

std::vector<int32_t> Placement::ranks_of_cut(int64_t percent) const {
  const auto cp_size = static_cast<int64_t>(ranks_.size());
  // Divided in this order because 100 times the pairs may not fit in 64 bits.
  const int64_t share = all_pairs_ / cp_size;
  const int64_t limit = std::max<int64_t>(1, share / 100 * percent + share % 100 * percent / 100);
  std::vector<int32_t> ranks;
  for (const int32_t document : order_) {
    const int64_t by_pairs = ceil_div(work_[document].pairs, limit);
    const int64_t by_tokens = ceil_div(row_.lengths[document], tokens_per_rank_);
    const int64_t needed = std::min(cp_size, std::max(by_pairs, by_tokens));
    if (needed <= 1) break;
    ranks.push_back(static_cast<int32_t>(needed));
  }
  return ranks;
}

Deal Placement::deal(const std::vector<int32_t>& ranks_of_cut) {
  for (Rank& rank : ranks_) {
    rank = Rank{};
    rank.whole.reserve(2 * row_.size() / ranks_.size());
  }
  std::ranges::fill(free_, tokens_per_rank_);
  std::ranges::fill(pairs_, 0);
  pairs_left_ = all_pairs_;
  tokens_left_ = row_.total_tokens;
  expect_anew();
  std::vector<int32_t> left;
  for (size_t i = 0; i < order_.size(); ++i) {
    const int32_t document = order_[i];
    if (row_.lengths[document] == 0) break;
    const int64_t ranks = i < ranks_of_cut.size() ? ranks_of_cut[i] : 1;
    if (ranks > 1) {
      std::vector<Share> shares = equal_shares(document, ranks);
      if (shares.empty()) {
        left.push_back(document);
      } else {
        cut(document, std::move(shares));
      }
    } else if (!place_whole(document)) {
      left.push_back(document);
    }
  }
  for (const int32_t document : left) {
    cut(document, shares_of_free(document));
  }
  Deal deal;
  for (Rank& rank : ranks_) {
    deal.push_back(std::move(rank.cut));
    deal.back().insert(deal.back().end(), rank.whole.begin(), rank.whole.end());
  }
  return deal;
}

void Placement::note_placed(int32_t document) {
  pairs_left_ -= work_[document].pairs;
  tokens_left_ -= row_.lengths[document];
  expect_anew();
}

void Placement::expect_anew() {
  density_ = tokens_left_ == 0 ? 0 : pairs_left_ / tokens_left_;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    expected_[rank] = pairs_[rank] + free_[rank] * density_;
  }
}

bool Placement::place_whole(int32_t document) {
  const int64_t length = row_.lengths[document];
  const size_t none = ranks_.size();
  size_t best = none;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t rank = 0; rank < none; ++rank) {
    const bool is_better = free_[rank] >= length && expected_[rank] < least;
    best = is_better ? rank : best;
    least = is_better ? expected_[rank] : least;
  }
  if (best == none) return false;
  ranks_[best].whole.push_back({document, 0, static_cast<int32_t>(length)});
  free_[best] -= length;
  pairs_[best] += work_[document].pairs;
  note_placed(document);
  return true;
}

// Return equal shares on the ranks that expect the least work. If these are too large for the
// ranks, return more and smaller ones; return none if no number of shares fits.
std::vector<Placement::Share> Placement::equal_shares(int32_t document, int64_t ranks) const {
  const int64_t length = row_.lengths[document];
  std::vector<Share> shares;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    shares.push_back({static_cast<int32_t>(rank), 0, expected_[rank]});
  }
  std::stable_sort(shares.begin(), shares.end(),
                   [](const Share& a, const Share& b) { return a.excess < b.excess; });
  for (; ranks <= static_cast<int64_t>(ranks_.size()); ++ranks) {
    const int64_t most = ceil_div(length, ranks);
    std::vector<Share> fitting;
    for (const Share& share : shares) {
      if (static_cast<int64_t>(fitting.size()) == ranks) break;
      if (free_[share.rank] >= most) fitting.push_back(share);
    }
    if (static_cast<int64_t>(fitting.size()) < ranks) continue;
    for (int64_t i = 0; i < ranks; ++i) {
      fitting[i].tokens = length * (i + 1) / ranks - length * i / ranks;
    }
    return fitting;
  }
  return {};
}

// Return shares that fill the emptiest ranks, as few as possible.
std::vector<Placement::Share> Placement::shares_of_free(int32_t document) const {
  std::vector<Share> shares;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    shares.push_back({static_cast<int32_t>(rank), free_[rank], expected_[rank]});
  }
  std::stable_sort(shares.begin(), shares.end(),
                   [](const Share& a, const Share& b) { return a.tokens > b.tokens; });
  int64_t left = row_.lengths[document];
  for (size_t i = 0; i < shares.size(); ++i) {
    shares[i].tokens = std::min(shares[i].tokens, left);
    left -= shares[i].tokens;
    if (left > 0) continue;
    shares.resize(i + 1);
    break;
  }
  return shares;
}

// Cut a document into the given shares. Each takes some tokens from the front of what is left and
// the others from its back; the last takes the middle. A token in front sees fewer keys than one at
// the back, so the split between both sets the pairs of a share. With equal shares on ranks without
// excess this is the zigzag cut.
void Placement::cut(int32_t document, std::vector<Share> shares) {
  const int64_t length = row_.lengths[document];
  const int64_t ranks = static_cast<int64_t>(shares.size());
  int64_t mean = 0;
  for (const Share& share : shares) mean += share.excess / ranks;
  for (Share& share : shares) share.excess -= mean;
  std::stable_sort(shares.begin(), shares.end(), [](const Share& a, const Share& b) {
    return (a.excess < 0 ? -a.excess : a.excess) > (b.excess < 0 ? -b.excess : b.excess);
  });
  const int64_t density = work_[document].pairs / length, rest = work_[document].pairs % length;
  int64_t begin = 0, end = length;
  int64_t owed = 0;  // pairs that the shares before this one should have taken
  for (const Share& share : shares) {
    const auto pairs = [&](int64_t front) {
      return pairs_of(begin, begin + front, window_) +
             pairs_of(end - (share.tokens - front), end, window_);
    };
    const int64_t wanted =
        share.tokens * density + share.tokens * rest / length - share.excess + owed;
    // The fewest tokens of the front with which the share has at most the pairs that it should,
    // or one less if that is nearer.
    int64_t front = 0, most = share.tokens;
    while (front < most) {
      const int64_t middle = front + (most - front) / 2;
      if (pairs(middle) <= wanted) {
        most = middle;
      } else {
        front = middle + 1;
      }
    }
    if (front > 0 && pairs(front - 1) - wanted < wanted - pairs(front)) --front;
    owed = wanted - pairs(front);
    Rank& rank = ranks_[share.rank];
    const auto piece = [&](int64_t first, int64_t last) {
      append(rank.cut, {document, static_cast<int32_t>(first), static_cast<int32_t>(last)});
    };
    pairs_[share.rank] += pairs(front);
    free_[share.rank] -= share.tokens;
    piece(begin, begin + front);
    begin += front;
    piece(end - (share.tokens - front), end);
    end -= share.tokens - front;
  }
  note_placed(document);
}

}  // namespace cuseq::cp
