#include "attention/side_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <exception>
#include <mutex>
#include <unordered_map>

namespace cuseq::attention {
namespace {

// Return the side stream of a device. There is one, because memory is reused within a stream. Its
// priority is high, so that small pieces get multiprocessors beside large kernels.
c10::Stream side_stream_of(c10::Device device) {
  static std::mutex mutex;
  static auto* streams = new std::unordered_map<c10::Device, c10::Stream>();
  const std::lock_guard lock(mutex);
  const auto found = streams->find(device);
  if (found != streams->end()) return found->second;
  const c10::impl::VirtualGuardImpl gpu(device.type());
  const c10::Stream stream = gpu.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  return streams->emplace(device, stream).first->second;
}

c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void wait_for(const c10::Stream& waits, const c10::Stream& works) {
  c10::Event done(works.device_type());
  done.record(works);
  done.block(waits);
}

// Run a destructor's work, which must not raise: an error of CUDA comes again at the next call.
template <typename Run>
void unless_it_fails(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
}

}  // namespace

SideStream::SideStream(const Tensor& like) {
  if (like.is_cpu()) return;
  stream_ = side_stream_of(like.device());
  wait_for(*stream_, current_stream_of(like.device()));
}

c10::OptionalStreamGuard SideStream::scope() const { return c10::OptionalStreamGuard(stream_); }

SideStream::~SideStream() {
  if (joined_ || !stream_.has_value()) return;
  unless_it_fails([&] { wait_for(current_stream_of(stream_->device()), *stream_); });
}

SideStream::Reading SideStream::join() {
  joined_ = true;
  if (stream_.has_value()) wait_for(current_stream_of(stream_->device()), *stream_);
  return Reading(stream_);
}

SideStream::Reading::~Reading() {
  if (!side_.has_value()) return;
  unless_it_fails([&] { wait_for(*side_, current_stream_of(side_->device())); });
}

}  // namespace cuseq::attention
