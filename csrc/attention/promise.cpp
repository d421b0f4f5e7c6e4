#include "attention/promise.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include "layout/host_meta.h"

namespace cuseq::attention {
namespace {

std::mutex mutex;
std::atomic<bool> any{false};

// Keyed by address: saved tensors and inputs of compiled code are other objects. A leaked map
// outlives threads that still run when the process ends.
std::unordered_map<const void*, int64_t>& promises() {
  static auto* numbers = new std::unordered_map<const void*, int64_t>();
  return *numbers;
}

}  // namespace

void promise_sequences(const Tensor& cu_seqlens, OptionalInt at_most) {
  const int64_t room = cu_seqlens.size(0) - 1;
  TORCH_CHECK_VALUE(!at_most.has_value() || (*at_most >= 1 && *at_most <= room),
                    "at_most must be from 1 to the ", room,
                    " sequences that cu_seqlens has room for, got ", at_most.value_or(0));
  const std::lock_guard<std::mutex> lock(mutex);
  if (at_most.has_value()) {
    promises()[cu_seqlens.const_data_ptr()] = *at_most;
  } else {
    promises().erase(cu_seqlens.const_data_ptr());
  }
  any.store(!promises().empty(), std::memory_order_release);
}

int64_t promised_sequences(const Tensor& cu_seqlens) {
  const int64_t room = cu_seqlens.size(0) - 1;
  if (!any.load(std::memory_order_acquire)) return room;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = promises().find(cu_seqlens.const_data_ptr());
  return found == promises().end() ? room : std::min(found->second, room);
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
  if (any.load(std::memory_order_acquire)) return;  // who captures has chosen the room
  const OptionalInt sequences =
      host_meta.has_value() ? sequences_on_host(*host_meta) : std::nullopt;
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
