#include "layout/host_meta.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "cache/host_copies.h"
#include "ops/dtype_name.h"

namespace cuseq {
namespace {

// Raise ValueError for the errors that the status of a host_meta reports.
void check_layout_status(int32_t status, int64_t num_seqs, int64_t total_tokens) {
  if (status == kLayoutOk) return;
  TORCH_CHECK_VALUE((status & kTooManySequences) == 0,
                    "there must be at most max_seqs = ", num_seqs,
                    " sequences, got more: pass a larger max_seqs");
  TORCH_CHECK_VALUE((status & kFirstOffsetNotZero) == 0,
                    "cu_seqlens must start at 0, but the device holds another first offset");
  TORCH_CHECK_VALUE((status & kNegativeLength) == 0,
                    "lengths must not be negative and cu_seqlens must not descend, but the device "
                    "holds such values; CUSEQ_CHECK=1 names the first one");
  TORCH_CHECK_VALUE((status & kSumAboveTotal) == 0,
                    "lengths must sum to at most total_tokens = ", total_tokens,
                    " after rounding up to segment_multiple, but those on the device sum to more");
}

bool is_host_meta(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kInt && tensor.dim() == 1 &&
         tensor.size(0) == kHostMetaSize && tensor.is_contiguous();
}

// Return the numbers of a host_meta; wait for its copy and check its status.
const int32_t* checked(const at::Tensor& host_meta) {
  TORCH_CHECK_VALUE(is_host_meta(host_meta), "host_meta must be the contiguous int32 [",
                    static_cast<int>(kHostMetaSize), "] on the CPU of a PackedLayout, got ",
                    dtype_name(host_meta.scalar_type()), " ", host_meta.sizes(), " on ",
                    host_meta.device());
  wait_host_copy(host_meta);
  const int32_t* meta = host_meta.const_data_ptr<int32_t>();
  check_layout_status(meta[kStatus], meta[kNumSeqs], meta[kTotalTokens]);
  return meta;
}

}  // namespace

HostMeta HostMeta::of(const at::Tensor& host_meta) {
  const int32_t* meta = checked(host_meta);
  TORCH_CHECK_VALUE(meta[kMaxSeqlen] >= 0 && meta[kMaxSeqlen] <= meta[kNumRealTokens] &&
                        meta[kNumRealTokens] <= meta[kTotalTokens],
                    "host_meta must hold max_seqlen <= num_real_tokens <= total_tokens, got ",
                    meta[kMaxSeqlen], ", ", meta[kNumRealTokens], ", ", meta[kTotalTokens]);
  return {meta[kNumSeqs], meta[kMaxSeqlen], meta[kTotalTokens], meta[kNumRealTokens],
          meta[kLengthDivisor]};
}

void HostMeta::check_offsets(const at::Tensor& cu_seqlens) const {
  TORCH_CHECK_VALUE(num_seqs >= 0 && num_seqs < cu_seqlens.size(0),
                    "cu_seqlens must have at least the layout's n_seqs + 1 = ", num_seqs + 1,
                    " entries, got ", cu_seqlens.size(0));
}

std::optional<SequencesOnHost> sequences_on_host(const at::Tensor& host_meta) {
  if (!is_host_meta(host_meta) || is_pending_host_copy(host_meta)) return std::nullopt;
  const int32_t* meta = host_meta.const_data_ptr<int32_t>();
  return SequencesOnHost{meta[kNumSeqs], (meta[kStatus] & kOfReplays) != 0};
}

int64_t read_host_meta(const at::Tensor& host_meta, int64_t slot) {
  TORCH_CHECK_VALUE(slot >= 0 && slot < kHostMetaSize, "slot must lie in [0, ",
                    static_cast<int>(kHostMetaSize), "), got ", slot);
  return checked(host_meta)[slot];
}

}  // namespace cuseq
