#include "cache/host_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "ops/checks.h"

// Host copies of lengths that exist only on the device: one asynchronous copy to pinned memory and
// an event. The first reader waits for the event, in Python or inside an op: in a compiled graph
// Python cannot wait.
namespace cuseq {
namespace {

using Pending = std::unordered_map<const void*, std::shared_ptr<c10::Event>>;

std::mutex mutex;
std::atomic<int64_t> number_pending{0};

// A child of fork() has only the forking thread: a mutex held by another thread would stay locked
// forever. So the forking thread holds it across the fork.
const int at_fork =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

// Keyed by address of the pinned memory: a copy to recycled memory replaces the old entry.
Pending& pending() {
  static auto* copies = new Pending();
  return *copies;
}

// Remove finished copies, which would accumulate if they were never waited for.
void forget_finished(std::vector<std::shared_ptr<c10::Event>>& finished) {
  constexpr size_t kFew = 64;
  if (pending().size() < kFew) return;
  std::erase_if(pending(), [&](auto& copy) {
    if (!copy.second->query()) return false;
    finished.push_back(std::move(copy.second));
    return true;
  });
}

}  // namespace

std::vector<at::Tensor> start_host_copy(const std::vector<at::Tensor>& on_device) {
  if (on_device[0].is_cpu()) return on_device;
  const c10::Device device = on_device[0].device();
  TORCH_CHECK(!is_capturing(on_device[0]),
              "lengths on the device cannot be copied to the host while a CUDA graph is captured: "
              "build the PackedLayout from host lengths, before the capture");
  int64_t size = 0;
  for (const at::Tensor& tensor : on_device) size += tensor.size(0);
  const at::Tensor pinned =
      at::empty({size}, on_device[0].options().device(at::kCPU).pinned_memory(true));
  std::vector<at::Tensor> on_host;
  int64_t begin = 0;
  for (const at::Tensor& tensor : on_device) {
    on_host.push_back(pinned.narrow(0, begin, tensor.size(0)));
    on_host.back().copy_(tensor, /*non_blocking=*/true);
    begin += tensor.size(0);
  }
  auto copied = std::make_shared<c10::Event>(device.type());
  copied->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  std::vector<std::shared_ptr<c10::Event>> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    forget_finished(finished);
    pending()[pinned.const_data_ptr()] = std::move(copied);
    number_pending = static_cast<int64_t>(pending().size());
  }
  return on_host;
}

std::tuple<at::Tensor, at::Tensor> copy_to_device(const at::Tensor& first, const at::Tensor& second,
                                                  c10::Device device) {
  for (const at::Tensor& tensor : {first, second}) {
    TORCH_INTERNAL_ASSERT(tensor.is_cpu() && tensor.scalar_type() == at::kInt &&
                          tensor.dim() == 1 && tensor.is_contiguous());
  }
  const at::Tensor pinned =
      at::empty({first.size(0) + second.size(0)}, first.options().pinned_memory(true));
  int32_t* numbers = pinned.mutable_data_ptr<int32_t>();
  numbers = std::copy_n(first.const_data_ptr<int32_t>(), first.size(0), numbers);
  std::copy_n(second.const_data_ptr<int32_t>(), second.size(0), numbers);
  const at::Tensor moved = at::empty({pinned.size(0)}, first.options().device(device));
  moved.copy_(pinned, /*non_blocking=*/true);
  return {moved.narrow(0, 0, first.size(0)), moved.narrow(0, first.size(0), second.size(0))};
}

void wait_host_copy(const at::Tensor& on_host) {
  if (number_pending.load(std::memory_order_acquire) == 0) return;
  std::shared_ptr<c10::Event> copied;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = pending().find(on_host.const_data_ptr());
    if (found == pending().end()) return;
    copied = found->second;
  }
  copied->synchronize();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = pending().find(on_host.const_data_ptr());
  // Do not erase a later copy to the same memory.
  if (found != pending().end() && found->second == copied) pending().erase(found);
  number_pending = static_cast<int64_t>(pending().size());
}

bool is_pending_host_copy(const at::Tensor& on_host) {
  if (number_pending.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  return pending().contains(on_host.const_data_ptr());
}

int64_t pending_host_copies() { return number_pending.load(std::memory_order_relaxed); }

}  // namespace cuseq
