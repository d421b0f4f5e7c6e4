#pragma once

#include "attention/call.h"

// Helpers for the flash-attention kernels of PyTorch and of the packages.
namespace cuseq::attention {

inline constexpr int64_t kMaxFlashHeadDim = 256;

// Return the head_dim that q, k and v are padded to: one for all of them, a multiple of 8.
int64_t flash_head_dim(const Call& call);

// Return rows of that head_dim that start at multiples of 16 bytes. flash-attention loads 16 bytes
// at a time without checking alignment: unaligned rows would cause a misaligned address error.
Tensor flash_rows(const Tensor& rows, int64_t head_dim);

// flash-attention's window does not count the query itself, ours does. Without a window both bounds
// are absent: FA4 through PyTorch's operator treats any bound as a window, and its backward does
// not support windows.
struct FlashWindow {
  OptionalInt left;
  OptionalInt right;

  explicit FlashWindow(const Call& call);
};

// Return whether flash-attention kernels take the call; see Backend::takes.
bool flash_takes(const Call& call, std::string* why);

}  // namespace cuseq::attention
