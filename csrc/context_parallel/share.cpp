#include "context_parallel/share.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

namespace cuseq::cp {
namespace {

// Tokens [begin, end) of a document that lie together on a rank, from its row `start` on.
struct Run {
  int32_t segment;
  int32_t begin;
  int32_t end;
  int32_t rank;
  int64_t start;
  bool is_cut;

  int64_t size() const { return end - begin; }
  bool operator<(const Run& other) const {
    return std::tie(segment, begin) < std::tie(other.segment, other.begin);
  }
};

using Runs = std::vector<Run>;

// Return the runs of a rank in its order.
Runs runs_of(const Plan& plan, int64_t rank) {
  Runs runs;
  int64_t start = 0;
  for (const Piece& piece : plan.deal[rank]) {
    const Piece real = real_part(plan.row, piece);
    if (real.size() == 0) continue;
    runs.push_back({real.segment, real.begin, real.end, static_cast<int32_t>(rank), start,
                    !is_whole(plan.row, real)});
    start += real.size();
  }
  return runs;
}

// The cut documents of a plan: their runs on all ranks by document and position.
class CutDocuments {
 public:
  explicit CutDocuments(const Plan& plan) : window_(plan.options.window) {
    for (int64_t rank = 0; rank < plan.options.cp_size; ++rank) {
      for (const Run& run : runs_of(plan, rank)) {
        if (run.is_cut) runs_.push_back(run);
      }
    }
    std::sort(runs_.begin(), runs_.end());
  }

  // Return what `rank` needs of the keys that `owner` holds, by document and position. If `owner`
  // is -1, return what it needs of all others.
  Runs needed(int64_t rank, int64_t owner) const {
    Runs found;
    for (size_t first = 0, end = 0; first < runs_.size(); first = end) {
      while (end < runs_.size() && runs_[end].segment == runs_[first].segment) ++end;
      const auto begin = runs_.begin() + static_cast<int64_t>(first);
      const Runs::const_iterator last = runs_.begin() + static_cast<int64_t>(end);
      int64_t seen = 0;
      for (auto query = begin; query != last; ++query) {
        if (query->rank != rank) continue;
        const int64_t from = std::max(seen, first_key(query->begin, window_));
        for (auto key = begin; key != query; ++key) {
          if (key->rank != rank && (owner < 0 || key->rank == owner)) {
            append_overlap(found, *key, from, query->begin);
          }
        }
        seen = query->end;
      }
    }
    return found;
  }

 private:
  static void append_overlap(Runs& runs, const Run& run, int64_t begin, int64_t end) {
    Run part = run;
    part.begin = static_cast<int32_t>(std::max<int64_t>(run.begin, begin));
    part.end = static_cast<int32_t>(std::min<int64_t>(run.end, end));
    if (part.begin >= part.end) return;
    part.start += part.begin - run.begin;
    runs.push_back(part);
  }

  Runs runs_;
  int64_t window_;
};

void check_room(const char* what, int64_t needed, int64_t room) {
  if (needed <= room) return;
  throw std::invalid_argument("room must have " + std::to_string(needed) + " " + what + ", got " +
                              std::to_string(room));
}

class Writer {
 public:
  Writer(const Plan& plan, int64_t rank, int64_t max_seqs, const std::optional<Room>& room)
      : plan_(plan), rank_(rank), capacities_(Capacities::of(plan, max_seqs)), room_(room) {
    share_.rows.assign(capacities_.total(), -1);
    const int64_t ranks = plan.options.cp_size;
    share_.meta.assign(static_cast<int64_t>(RankMetaSlot::kSize) + 2 * ranks, 0);
    set(RankMetaSlot::kCpSize, ranks);
    set(RankMetaSlot::kRank, rank);
    set(RankMetaSlot::kOfReplays, room.has_value());
    set(RankMetaSlot::kUlysses, plan.options.policy == Policy::kUlysses);
    set(RankMetaSlot::kWindow, plan.options.window);
    const int64_t far = room ? (ranks - 1) * room->far : plan.costs.max_far_rows;
    set(RankMetaSlot::kAnyFar, room ? far > 0 : plan.costs.far_rows > 0);
    set(RankMetaSlot::kSavesFarRows, far <= plan.tokens_per_rank() / kTokensPerKeptRow);
    set(RankMetaSlot::kHashLow, static_cast<int32_t>(plan.hash));
    set(RankMetaSlot::kHashHigh, static_cast<int32_t>(plan.hash >> 32));
    set(RankMetaSlot::kRowTokens, plan.tokens_per_rank());
    set(RankMetaSlot::kPieceCapacity, capacities_.pieces);
    set(RankMetaSlot::kKeyCapacity, capacities_.keys);
    set(RankMetaSlot::kSendCapacity, capacities_.sent);
    set(RankMetaSlot::kSourceCapacity, capacities_.sources);
  }

  Share documents() && {
    Runs runs;
    std::vector<int32_t> starts{0};
    for (int64_t i = 0; i + 1 < plan_.row.size(); ++i) {  // the last segment is the tail
      const auto segment = static_cast<int32_t>(plan_.row.segments[i]);
      if (segment == 0) continue;
      const auto length = static_cast<int32_t>(plan_.row.lengths[i]);
      runs.push_back({static_cast<int32_t>(i), 0, length, 0, starts.back(), false});
      starts.push_back(starts.back() + segment);
    }
    write_pieces(runs, 0);
    write_keys({}, {});
    starts.resize(capacities_.pieces + 1, starts.back());
    std::ranges::copy(starts, share_.rows.begin() + capacities_.pieces + 1);
    write_terms();
    return std::move(share_);
  }

  Share exchange() && {
    const Runs runs = runs_of(plan_, rank_);
    size_t cut = runs.size();
    while (cut > 0 && !runs[cut - 1].is_cut) --cut;
    write_pieces(runs, cut);
    const CutDocuments documents(plan_);
    write_keys({runs.begin(), runs.begin() + static_cast<int64_t>(cut)}, received(documents));
    write_sent(documents);
    write_terms();
    return std::move(share_);
  }

 private:
  void set(RankMetaSlot slot, int64_t value) {
    share_.meta[static_cast<size_t>(slot)] = static_cast<int32_t>(value);
  }

  // Write the offsets of the pieces' queries, the first `cut` of which are cut.
  void write_pieces(const Runs& runs, size_t cut) {
    if (room_) {
      check_room("cut pieces", static_cast<int64_t>(cut), room_->cut);
      check_room("whole pieces", static_cast<int64_t>(runs.size() - cut), room_->whole);
    }
    int32_t* offset = share_.rows.data();
    int64_t tokens = 0, cut_tokens = 0, longest_cut = 0, longest_whole = 0;
    *offset = 0;
    for (size_t i = 0; i < runs.size(); ++i) {
      if (i == cut && room_)
        offset = without_tokens(offset, room_->cut - static_cast<int64_t>(cut));
      tokens += runs[i].size();
      if (i < cut) cut_tokens = tokens;
      int64_t& longest = i < cut ? longest_cut : longest_whole;
      longest = std::max(longest, runs[i].size());
      *++offset = static_cast<int32_t>(tokens);
    }
    if (room_) check_room("tokens of cut pieces", cut_tokens, room_->cut_tokens);
    std::fill(offset + 1, share_.rows.data() + capacities_.pieces + 1,
              static_cast<int32_t>(tokens));
    if (room_) {
      const int64_t held = plan_.options.policy == Policy::kUlysses ? plan_.row.total_tokens
                                                                    : plan_.tokens_per_rank();
      set_pieces(room_->cut + room_->whole, room_->cut, held, room_->cut_tokens, held,
                 room_->cut_tokens);
    } else {
      set_pieces(static_cast<int64_t>(runs.size()), static_cast<int64_t>(cut), tokens, cut_tokens,
                 longest_whole, longest_cut);
    }
  }

  // Write pieces without tokens behind an offset; return the place of the last one.
  static int32_t* without_tokens(int32_t* offset, int64_t count) {
    return std::fill_n(offset + 1, count, *offset) - 1;
  }

  void set_pieces(int64_t pieces, int64_t cut, int64_t tokens, int64_t cut_tokens,
                  int64_t longest_whole, int64_t longest_cut) {
    set(RankMetaSlot::kNumPieces, pieces);
    set(RankMetaSlot::kNumCut, cut);
    set(RankMetaSlot::kNumTokens, tokens);
    set(RankMetaSlot::kNumCutTokens, cut_tokens);
    set(RankMetaSlot::kLongestWhole, longest_whole);
    set(RankMetaSlot::kLongestCut, longest_cut);
  }

  // Return the place of another rank's first row among those of all others, if all have room.
  int64_t room_of(int64_t peer) const { return (peer < rank_ ? peer : peer - 1) * room_->far; }

  // Set how many rows this rank sends to each, or receives from each, if there is room.
  void set_room_of_peers(int32_t* rows) const {
    for (int64_t peer = 0; peer < plan_.options.cp_size; ++peer) {
      rows[peer] = peer == rank_ ? 0 : static_cast<int32_t>(room_->far);
    }
  }

  // Return the far rows of this rank by document and position; `start` is their place among the
  // sources, after the rows of the cut pieces.
  Runs received(const CutDocuments& documents) {
    Runs runs = documents.needed(rank_, -1);
    std::stable_sort(runs.begin(), runs.end(),
                     [](const Run& a, const Run& b) { return a.rank < b.rank; });
    const int64_t own = share_.at(RankMetaSlot::kNumCutTokens);
    int64_t rows = 0;
    int32_t* from =
        share_.meta.data() + static_cast<size_t>(RankMetaSlot::kSize) + plan_.options.cp_size;
    for (Run& run : runs) {
      run.start = own + (room_ ? room_of(run.rank) + from[run.rank] : rows);
      rows += run.size();
      from[run.rank] += static_cast<int32_t>(run.size());
    }
    if (room_) {
      check_room("far rows", *std::max_element(from, from + plan_.options.cp_size), room_->far);
      set_room_of_peers(from);
    }
    set(RankMetaSlot::kNumFarRows, room_ ? (plan_.options.cp_size - 1) * room_->far : rows);
    std::sort(runs.begin(), runs.end());
    return runs;
  }

  // Write the sources of each cut piece's keys, in the order of their positions.
  void write_keys(const Runs& cut, const Runs& far_runs) {
    Runs sources = far_runs;
    sources.insert(sources.end(), cut.begin(), cut.end());
    std::sort(sources.begin(), sources.end());
    int32_t* offsets = share_.rows.data() + capacities_.pieces + 1;
    int32_t* keys = offsets + capacities_.pieces + 1;
    int64_t count = 0, longest = 0;
    offsets[0] = 0;
    for (size_t i = 0; i < cut.size(); ++i) {
      const Run& piece = cut[i];
      const int64_t before = count;
      const int64_t begin = first_key(piece.begin, plan_.options.window);
      auto source =
          std::lower_bound(sources.begin(), sources.end(), Run{piece.segment, 0, 0, 0, 0, false});
      for (; source != sources.end() && source->segment == piece.segment; ++source) {
        const int64_t first = std::max<int64_t>(source->begin, begin);
        const int64_t end = std::min(source->end, piece.end);
        for (int64_t key = first; key < end; ++key) {
          keys[count++] = static_cast<int32_t>(source->start + key - source->begin);
        }
      }
      longest = std::max(longest, count - before);
      offsets[i + 1] = static_cast<int32_t>(count);
    }
    std::fill(offsets + cut.size() + 1, offsets + capacities_.pieces + 1,
              static_cast<int32_t>(count));
    if (room_) check_room("keys", count, room_->keys);
    set(RankMetaSlot::kLongestKeys,
        room_ ? std::min(room_->keys, plan_.row.total_tokens) : longest);
    set(RankMetaSlot::kNumKeyRows, room_ ? room_->keys : count);
  }

  void write_sent(const CutDocuments& documents) {
    int32_t* rows = sent_section();
    int32_t* to = share_.meta.data() + static_cast<size_t>(RankMetaSlot::kSize);
    int64_t count = 0;
    for (int64_t peer = 0; peer < plan_.options.cp_size; ++peer) {
      if (peer == rank_) continue;
      if (room_) count = room_of(peer);
      for (const Run& run : documents.needed(peer, rank_)) {
        if (room_) check_room("far rows", to[peer] + run.size(), room_->far);
        for (int64_t i = 0; i < run.size(); ++i) {
          rows[count++] = static_cast<int32_t>(run.start + i);
        }
        to[peer] += static_cast<int32_t>(run.size());
      }
    }
    if (room_) set_room_of_peers(to);
    set(RankMetaSlot::kNumSentRows, room_ ? (plan_.options.cp_size - 1) * room_->far : count);
  }

  // Write, for each source, where the terms of its gradient are.
  void write_terms() {
    const int32_t* keys = sent_section() - capacities_.keys;
    const int32_t num_keys = share_.at(RankMetaSlot::kNumKeyRows);
    const int32_t num_sent = share_.at(RankMetaSlot::kNumSentRows);
    int32_t* offsets = sent_section() + capacities_.sent;
    int32_t* terms = offsets + capacities_.sources + 1;
    const auto source_of = [&](int32_t term) {
      return term < num_keys ? keys[term] : sent_section()[term - num_keys];
    };
    std::fill(offsets, terms, 0);
    for (int32_t term = 0; term < num_keys + num_sent; ++term) {
      if (source_of(term) >= 0) ++offsets[source_of(term) + 1];
    }
    std::partial_sum(offsets, terms, offsets);
    std::vector<int32_t> next(offsets, terms);
    for (int32_t term = 0; term < num_keys + num_sent; ++term) {
      if (source_of(term) >= 0) terms[next[source_of(term)]++] = term;
    }
  }

  int32_t* sent_section() {
    return share_.rows.data() + 2 * (capacities_.pieces + 1) + capacities_.keys;
  }

  const Plan& plan_;
  int64_t rank_;
  Capacities capacities_;
  std::optional<Room> room_;
  Share share_;
};

}  // namespace

Capacities Capacities::of(const Plan& plan, int64_t max_seqs) {
  const int64_t own = plan.tokens_per_rank();
  if (plan.options.policy == Policy::kUlysses) return {max_seqs, 0, 0, 0};
  const int64_t pieces = std::min(own, 2 * max_seqs);
  if (plan.options.cp_size == 1) return {pieces, 0, 0, 0};
  const int64_t others = plan.row.total_tokens - own;
  const int64_t received = std::min(others, plan.options.max_far_rows.value_or(others));
  const int64_t sent = std::min(others, received * (plan.options.cp_size - 1));
  // All pieces of a rank may be cut, or all may be whole, and a room has places for both. A room
  // has as many places for far rows as for sent rows.
  return {2 * pieces, 2 * (own + received), sent, own + sent};
}

Room most_room(const Plan& plan, int64_t max_seqs) {
  const Capacities capacities = Capacities::of(plan, max_seqs);
  const bool cuts = plan.options.policy != Policy::kUlysses && plan.options.cp_size > 1;
  const int64_t pieces = cuts ? capacities.pieces / 2 : capacities.pieces;
  const int64_t peers = std::max<int64_t>(1, plan.options.cp_size - 1);
  return {pieces, cuts ? pieces : 0, cuts ? plan.tokens_per_rank() : 0, capacities.keys,
          capacities.sent / peers};
}

Share share_of(const Plan& plan, int64_t rank, int64_t max_seqs, const std::optional<Room>& room) {
  if (room) {
    const Room most = most_room(plan, max_seqs);
    if (std::min({room->whole, room->cut, room->cut_tokens, room->keys, room->far}) < 0 ||
        room->whole > most.whole || room->cut > most.cut || room->cut_tokens > most.cut_tokens ||
        room->keys > most.keys || room->far > most.far) {
      throw std::invalid_argument("room must have no more than the sections of the share");
    }
  }
  Writer writer(plan, rank, max_seqs, room);
  return plan.options.policy == Policy::kUlysses ? std::move(writer).documents()
                                                 : std::move(writer).exchange();
}

}  // namespace cuseq::cp
