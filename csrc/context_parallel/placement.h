#pragma once

#include <cstdint>
#include <vector>

#include "context_parallel/cost.h"
#include "context_parallel/deal.h"

namespace cuseq::cp {

// Documents of a row from the longest to the shortest, in the order of the row among equals.
std::vector<int32_t> longest_first(const Row& row);

// Deal whole documents where possible. A document is cut if it is longer than a rank or if its
// attention is more than `percent` of a rank's share; it is then cut over so many ranks that each
// piece is neither. Documents that fit on no rank are cut to fill the free places.
class Placement {
 public:
  Placement(const Row& row, const std::vector<Work>& work, const std::vector<int32_t>& order,
            int64_t cp_size, int64_t window);

  // Return the number of ranks over which each document is cut at first, in the order of
  // `longest_first` up to the first document that stays whole. Equal numbers give equal deals.
  std::vector<int32_t> ranks_of_cut(int64_t percent) const;

  Deal deal(const std::vector<int32_t>& ranks_of_cut);

 private:
  struct Rank {
    Pieces cut;
    Pieces whole;
  };
  struct Share {
    int32_t rank = 0;
    int64_t tokens = 0;
    int64_t excess = 0;  // pairs that the rank is expected to have above the others
  };

  void note_placed(int32_t document);
  void expect_anew();
  bool place_whole(int32_t document);
  std::vector<Share> equal_shares(int32_t document, int64_t ranks) const;
  std::vector<Share> shares_of_free(int32_t document) const;
  void cut(int32_t document, std::vector<Share> shares);

  const Row& row_;
  const std::vector<Work>& work_;
  const std::vector<int32_t>& order_;
  int64_t window_;
  int64_t tokens_per_rank_;
  int64_t all_pairs_ = 0;
  std::vector<Rank> ranks_;
  // By rank, apart from its pieces: every whole document compares all of them.
  std::vector<int64_t> free_;      // tokens
  std::vector<int64_t> pairs_;     // query-key pairs placed so far
  std::vector<int64_t> expected_;  // pairs at the end, as far as they are known
  int64_t pairs_left_ = 0;         // of documents that are not placed
  int64_t tokens_left_ = 0;        // free ones of all ranks
  // Pairs that a free token will bring. Documents are placed in descending length, so the longer
  // ones weigh more than the tokens that they take.
  int64_t density_ = 0;
};

}  // namespace cuseq::cp
