#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "context_parallel/plan.h"
#include "context_parallel/rank_meta.h"
#include "cuseq/macros.h"

namespace cuseq::cp {

// The room of a CUDA graph: how many pieces a rank attends over and how many rows it exchanges, the
// same numbers in every replay, whatever the plan.
struct Room {
  int64_t whole = 0;       // pieces after the cut ones
  int64_t cut = 0;         // cut pieces
  int64_t cut_tokens = 0;  // tokens of the cut pieces together
  int64_t keys = 0;        // keys of the cut pieces together
  int64_t far = 0;         // rows that one rank sends to another
};

// One rank's share of a plan, as the two tensors that its attention reads. Its sources are the rows
// that are keys of its cut pieces: first the own ones, which are the tokens of the cut pieces, then
// the far rows, received from rank 0, then from rank 1 and so on, for each rank by document and
// position.
//
// The share of a room has the same sections. There, cut pieces without queries fill up to room.cut,
// so that the first whole piece is always the same; the own sources are the first room.cut_tokens
// tokens of the rank; and each other rank has places for room.far rows among the far ones and the
// sent ones, of which it uses the first. Places that are not used have source -1. Its meta says
// room instead of what the plan needs.
struct Share {
  // Sections of fixed capacity, so that one compiled graph serves every plan:
  //   [piece_capacity + 1] offsets of the pieces' queries, the last one repeated;
  //   [piece_capacity + 1] offsets of the cut pieces' keys, the last one repeated; with Ulysses,
  //     which cuts no pieces, where the documents' segments start in the whole row and where the
  //     last one ends;
  //   [key_capacity] source of each key of the cut pieces, then -1;
  //   [send_capacity] sources to send, to rank 0, to rank 1 and so on, then -1;
  //   [source_capacity + 1] offsets of each source's terms, the last one repeated;
  //   [key_capacity + send_capacity] terms of each source's gradient, then -1: the keys that are
  //     copies of it, and after all keys the sent rows that are, in the order of the ranks.
  std::vector<int32_t> rows;
  std::vector<int32_t> meta;  // RankMetaSlot, then the rows sent to and received from each rank

  int32_t at(RankMetaSlot slot) const { return meta[static_cast<size_t>(slot)]; }
};

struct Capacities {
  int64_t pieces = 0;
  int64_t keys = 0;
  int64_t sent = 0;
  int64_t sources = 0;

  // Capacities that are enough for every plan of rows with as many tokens and at most `max_seqs`
  // documents. A rank has at most two pieces of a document, so each row is a key of at most two.
  static CUSEQ_API Capacities of(const Plan& plan, int64_t max_seqs);

  int64_t total() const { return 2 * (pieces + 1 + keys + sent) + sources + 1; }
};

// Return the most room that the sections have.
CUSEQ_API Room most_room(const Plan& plan, int64_t max_seqs);

// Return the share of a rank. Raises std::invalid_argument if the room has not what it needs, or
// the sections have not the room.
CUSEQ_API Share share_of(const Plan& plan, int64_t rank, int64_t max_seqs,
                         const std::optional<Room>& room = std::nullopt);

}  // namespace cuseq::cp
