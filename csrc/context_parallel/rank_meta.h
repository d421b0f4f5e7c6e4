#pragma once

#include <cstdint>

// rank_meta is an int32 CPU tensor with the numbers of a rank's share that host code needs, as
// host_meta has those of a layout. Ops read it when they run, so one compiled graph serves every
// plan.
namespace cuseq {

// Tokens of a rank for each far row that the forward can keep for the backward. A plan that gives a
// rank more rows exchanges them again.
inline constexpr int64_t kTokensPerKeptRow = 16;

// Index of each entry. Python reads these numbers as `_C.RankMeta`. After kSize there are cp_size
// numbers of rows that this rank sends to each rank, and cp_size numbers of rows that it receives.
enum class RankMetaSlot : int32_t {
  kCpSize,
  kRank,
  kOfReplays,     // 1: the numbers below are those of a room that a CUDA graph has, and bounds
  kUlysses,       // 1: heads are exchanged, and the pieces are the documents of the whole row
  kWindow,        // keys that a token sees at most; 0: all
  kAnyFar,        // whether any rank of the plan receives rows
  kSavesFarRows,  // whether the backward uses the far rows of the forward, on all ranks
  kNumPieces,     // pieces of this rank, of which
  kNumCut,        // the first ones need keys besides their own, and
  kNumTokens,     // tokens of all pieces
  kNumCutTokens,  // tokens of the cut ones
  kLongestWhole,  // queries of the longest piece after the cut ones
  kLongestCut,    // queries of the longest cut piece
  kLongestKeys,   // keys of the cut piece that has the most
  kNumKeyRows,    // keys of all cut pieces together
  kNumFarRows,    // rows that this rank receives
  kNumSentRows,   // rows that it sends
  kRowTokens,     // tokens of each rank's part of the row, tail included
  kHashLow,       // the plan's hash
  kHashHigh,
  kPieceCapacity,   // sections of rank_rows: twice this + 1 offsets,
  kKeyCapacity,     // this many key rows,
  kSendCapacity,    // this many rows to send,
  kSourceCapacity,  // this + 1 offsets, and as many terms as key rows and rows to send
  kSize,
};

}  // namespace cuseq
