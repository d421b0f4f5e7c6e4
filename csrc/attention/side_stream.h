#pragma once

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

#include "ops/types.h"

// Work beside the current stream of a GPU. On a CPU it runs in turn.
namespace cuseq::attention {

class SideStream {
 public:
  // The side stream waits for what the current stream has been given so far.
  explicit SideStream(const Tensor& like);
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  // Joins if an error came before.
  ~SideStream();

  // Run what follows on the side stream while the guard lives.
  c10::OptionalStreamGuard scope() const;

  // Lets the current stream read tensors of the side stream. It must go before they are freed:
  // freed memory belongs to the side stream, which then waits for the last read.
  class Reading {
   public:
    explicit Reading(const std::optional<c10::Stream>& side) : side_(side) {}
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    ~Reading();

   private:
    std::optional<c10::Stream> side_;
  };

  // Let the current stream wait for the side stream.
  [[nodiscard]] Reading join();

 private:
  std::optional<c10::Stream> stream_;
  bool joined_ = false;
};

}  // namespace cuseq::attention
