#pragma once

#include <cstdint>
#include <optional>

#include "cuseq/macros.h"

namespace at {
class Tensor;
}

// host_meta is an int32 CPU tensor with the few numbers about a layout that host code needs.
// Kernels write it on the device and it is copied from there, so this header includes no torch.
namespace cuseq {

// Index of each entry of host_meta. Python reads these numbers as `_C.HostMeta`.
enum HostMetaSlot : int32_t {
  kNumSeqs = 0,
  kMaxSeqlen = 1,
  kTotalTokens = 2,
  kNumRealTokens = 3,
  kStatus = 4,
  kLengthDivisor = 5,  // greatest common divisor of the lengths; 0 without tokens
  kHostMetaSize = 6,
};

// Errors in lengths whose values only the device knows, as bits. Kernels stay inside their tensors
// whatever values they read and set these bits; the host raises when it first reads the host_meta.
// The last bit is not an error: a layout holds such a host_meta while a CUDA graph is captured, and
// its kNumSeqs is the most sequences that rows will have in replays.
enum LayoutStatus : int32_t {
  kLayoutOk = 0,
  kNegativeLength = 1,
  kSumAboveTotal = 2,
  kFirstOffsetNotZero = 4,
  kTooManySequences = 8,
  kOfReplays = 16,
};

struct HostMeta {
  int64_t num_seqs = 0;
  int64_t max_seqlen = 0;
  int64_t total_tokens = 0;
  int64_t num_real_tokens = 0;
  int64_t length_divisor = 0;

  // Read a host_meta; wait for its copy from the device if one is pending. Raise ValueError if the
  // tensor is not a host_meta or if its status reports an error.
  static HostMeta of(const at::Tensor& host_meta);

  // Raise ValueError unless cu_seqlens has an entry for each offset of this layout.
  void check_offsets(const at::Tensor& cu_seqlens) const;
};

struct SequencesOnHost {
  int64_t count = 0;
  bool of_replays = false;  // kOfReplays
};

// Return the number of sequences, or none unless the host has it already. Neither waits nor checks,
// so that it can be called while a CUDA graph is captured.
std::optional<SequencesOnHost> sequences_on_host(const at::Tensor& host_meta);

// Return one number of a host_meta by its HostMetaSlot; waits and checks as HostMeta::of does.
CUSEQ_API int64_t read_host_meta(const at::Tensor& host_meta, int64_t slot);

}  // namespace cuseq
