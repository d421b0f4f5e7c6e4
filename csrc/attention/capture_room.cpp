#include "attention/capture_room.h"

#include <algorithm>
#include <string>

#include "layout/host_meta.h"

namespace cuseq::attention {
namespace {

std::optional<SequencesOnHost> on_host(const OptionalTensor& host_meta) {
  return host_meta.has_value() ? sequences_on_host(*host_meta) : std::nullopt;
}

}  // namespace

int64_t sequences_of_capture(const Tensor& cu_seqlens, const OptionalTensor& host_meta) {
  const int64_t room = cu_seqlens.size(0) - 1;
  const auto sequences = on_host(host_meta);
  return sequences.has_value() && sequences->of_replays ? std::min(sequences->count, room) : room;
}

// Kernels work in tiles of up to 128 tokens, and a graph launches at least one for each sequence
// that there is room for. Room is noticed where these outnumber the tiles of the row's own tokens:
// one layer of 2,048 tokens in 7 sequences took 240 us with room for 8, 358 for 64, 493 for 128 and
// 2,495 for 1,024 (H200, python/cuseq/attention/table.csv). Four times the sequences of one row is
// left to rows that have more of them.
bool has_needless_room(int64_t room, OptionalInt sequences, int64_t tokens) {
  constexpr int64_t kTile = 128;
  constexpr int64_t kSpare = 4;
  if (!sequences.has_value()) return tokens > 0 && room >= tokens;
  return tokens > 0 && room > kSpare * std::max<int64_t>(*sequences, 1) && kTile * room > tokens;
}

void warn_of_needless_room(const Tensor& cu_seqlens, const OptionalTensor& host_meta,
                           int64_t tokens) {
  const auto known = on_host(host_meta);
  if (known.has_value() && known->of_replays) return;
  const OptionalInt sequences = known.has_value() ? OptionalInt(known->count) : std::nullopt;
  const int64_t room = cu_seqlens.size(0) - 1;
  if (!has_needless_room(room, sequences, tokens)) return;
  TORCH_WARN_ONCE(
      "cuseq.varlen_attention: a CUDA graph is captured with room for ", room, " sequences in ",
      tokens, " tokens, and the row has ",
      sequences.has_value() ? std::to_string(*sequences) : "a number that only the device knows",
      ": each replay pays for all that there is room for. Make the layout with max_seqs near the "
      "most sequences that a row will have (PackedLayout.from_lengths, PackingCollator), or let "
      "cuseq.GraphedStep capture the step, which chooses the room itself");
}

}  // namespace cuseq::attention
