#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/call.h"
#include "context_parallel/rank_meta.h"

// A rank's share of a context-parallel plan, as attention reads it from the tensors of a layout.
namespace cuseq::attention {

class RankShare {
 public:
  // Check both tensors and read the numbers. `group` names the process group of the ranks.
  static CUSEQ_API RankShare of(const Tensor& rank_rows, const Tensor& rank_meta, std::string group,
                                const Tensor& q);

  int64_t at(RankMetaSlot slot) const { return numbers_[static_cast<size_t>(slot)]; }
  // Whether ranks exchange heads. One rank alone has the whole row: it exchanges nothing.
  bool is_ulysses() const {
    return at(RankMetaSlot::kUlysses) != 0 && at(RankMetaSlot::kCpSize) > 1;
  }
  // Whether the numbers are those of a room and bounds, which the rows of a replay stay inside.
  bool is_of_replays() const { return at(RankMetaSlot::kOfReplays) != 0; }
  // Whether the backward uses the far rows that the forward returned.
  bool saves_far_rows() const { return at(RankMetaSlot::kSavesFarRows) != 0; }
  const std::string& group() const { return group_; }

  // Rows that this rank sends to each rank, and that it receives.
  std::vector<int64_t> sent() const { return per_rank(0); }
  std::vector<int64_t> received() const { return per_rank(at(RankMetaSlot::kCpSize)); }

  Sequences cut_queries() const;    // from the first row on
  Sequences cut_keys() const;       // of key_sources
  Sequences whole_queries() const;  // documents after the cut pieces; with Ulysses, all

  // With Ulysses: where the documents' segments start in the whole row, int32 [documents + 1].
  Tensor segment_starts() const {
    return section(at(RankMetaSlot::kPieceCapacity) + 1, at(RankMetaSlot::kNumPieces) + 1);
  }

  // Keys of the piece that has the most, its own included.
  int64_t longest_keys() const {
    return std::max(at(RankMetaSlot::kLongestKeys), at(RankMetaSlot::kLongestWhole));
  }

  Tensor key_sources() const;   // int32 [num_key_rows]
  Tensor sent_sources() const;  // int32 [num_sent_rows]
  // Offsets of the terms of the sources [first, first + count), int32 [count + 1].
  Tensor term_offsets(int64_t first, int64_t count) const;
  Tensor terms() const;  // int32 [num_key_rows + num_sent_rows]

  // Return the queries times keys of all pieces; with Ulysses, this rank's share of the row's. This
  // reads offsets, which synchronises on a GPU.
  CUSEQ_API int64_t pairs() const;

  // Raise ValueError unless the plan serves these options: it moves keys for causal attention in
  // its window only.
  void check_options(bool causal, OptionalInt window, bool has_spans) const;

 private:
  std::vector<int64_t> per_rank(int64_t first) const;
  Tensor section(int64_t begin, int64_t size) const { return rows_.narrow(0, begin, size); }
  Sequences sequences(int64_t begin, int64_t count, int64_t longest, int64_t tokens) const;
  int64_t keys_begin() const { return 2 * (at(RankMetaSlot::kPieceCapacity) + 1); }
  int64_t sent_begin() const { return keys_begin() + at(RankMetaSlot::kKeyCapacity); }
  int64_t terms_begin() const { return sent_begin() + at(RankMetaSlot::kSendCapacity); }

  Tensor rows_;
  std::vector<int64_t> numbers_;
  std::string group_;
};

}  // namespace cuseq::attention
