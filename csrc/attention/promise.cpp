#include "attention/promise.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

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

}  // namespace cuseq::attention
