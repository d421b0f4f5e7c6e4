#include "ops/checks.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "cuseq/ops.h"
#include "cuseq/seqlens.h"

namespace cuseq {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

at::Tensor as_host_int64(const at::Tensor& tensor) {
  return tensor.to(at::TensorOptions().dtype(at::kLong).device(at::kCPU)).contiguous();
}

}  // namespace

bool device_checks_enabled() {
  static const bool enabled = switch_from_environment("CUSEQ_CHECK", false);
  return enabled;
}

bool values_can_be_read(const at::Tensor& tensor) {
  return tensor.is_cpu() || (device_checks_enabled() && !is_capturing(tensor));
}

void check_integer(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, name,
                   " must be int32 or int64, got ", tensor.scalar_type());
}

void check_vector(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 1, name, " must have one dimension, got shape ",
                    tensor.sizes());
  check_integer(tensor, name);
  TORCH_CHECK_VALUE(tensor.size(0) < kMaxTokens, name, " must have fewer than 2^31 entries, got ",
                    tensor.size(0));
}

void check_offsets(const at::Tensor& cu_seqlens) {
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
                    "cu_seqlens must have shape [n_seqs + 1], got ", cu_seqlens.sizes());
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, "cu_seqlens must be int32, got ",
                   cu_seqlens.scalar_type());
  TORCH_CHECK_VALUE(cu_seqlens.is_contiguous(), "cu_seqlens must be contiguous, got stride ",
                    cu_seqlens.strides());
}

void check_tokens(int64_t total_tokens) {
  TORCH_CHECK_VALUE(total_tokens >= 0 && total_tokens <= kMaxTokens,
                    "total_tokens must lie in [0, 2^31 - 1], got ", total_tokens);
}

void check_window(std::optional<int64_t> window) {
  TORCH_CHECK_VALUE(!window.has_value() || *window >= 1,
                    "window must be None or at least 1, the keys that a query sees with itself "
                    "included, got ",
                    window.value_or(0));
}

void check_length_values(const at::Tensor& lengths, int64_t total_tokens) {
  if (!values_can_be_read(lengths)) return;
  const at::Tensor host = as_host_int64(lengths);
  const int64_t* values = host.const_data_ptr<int64_t>();
  int64_t sum = 0;
  for (int64_t i = 0; i < host.numel(); ++i) {
    TORCH_CHECK_VALUE(values[i] >= 0, "lengths must not be negative, got lengths[", i,
                      "] = ", values[i]);
    // Compared before adding, so that no sum of int64 values can overflow.
    TORCH_CHECK_VALUE(values[i] <= kMaxTokens - sum,
                      "lengths must sum to at most 2^31 - 1 tokens, offsets are int32, but "
                      "lengths[",
                      i, "] = ", values[i], " comes after ", sum, " tokens");
    sum += values[i];
  }
  TORCH_CHECK_VALUE(total_tokens < 0 || sum <= total_tokens, "lengths must sum to at most ",
                    "total_tokens = ", total_tokens, ", got ", sum);
}

void check_offset_values(const at::Tensor& cu_seqlens, int64_t total_tokens) {
  if (!values_can_be_read(cu_seqlens) || cu_seqlens.numel() == 0) return;
  const at::Tensor host = as_host_int64(cu_seqlens);
  const int64_t* values = host.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(values[0] == 0, "cu_seqlens must start at 0, got cu_seqlens[0] = ", values[0]);
  for (int64_t i = 1; i < host.numel(); ++i) {
    TORCH_CHECK_VALUE(values[i] >= values[i - 1], "cu_seqlens must not descend, got cu_seqlens[",
                      i - 1, "] = ", values[i - 1], " and cu_seqlens[", i, "] = ", values[i]);
  }
  const int64_t last = values[host.numel() - 1];
  TORCH_CHECK_VALUE(last <= kMaxTokens, "cu_seqlens must end at 2^31 - 1 tokens or before, got ",
                    last);
  TORCH_CHECK_VALUE(total_tokens < 0 || last <= total_tokens, "cu_seqlens must end at or before ",
                    "total_tokens = ", total_tokens, ", got ", last);
}

void check_padded_offsets(const std::optional<at::Tensor>& cu_seqlens_padded,
                          const at::Tensor& cu_seqlens, int64_t total_tokens) {
  if (!cu_seqlens_padded.has_value()) return;
  const at::Tensor& padded = *cu_seqlens_padded;
  TORCH_CHECK_TYPE(padded.scalar_type() == at::kInt, "cu_seqlens_padded must be int32, got ",
                   padded.scalar_type());
  TORCH_CHECK_VALUE(padded.sizes() == cu_seqlens.sizes() && padded.is_contiguous(),
                    "cu_seqlens_padded must be contiguous [n_seqs + 1 = ", cu_seqlens.size(0),
                    "], got shape ", padded.sizes());
  TORCH_CHECK_VALUE(padded.device() == cu_seqlens.device(),
                    "cu_seqlens_padded must lie where the lengths do, on ", cu_seqlens.device(),
                    ", got ", padded.device());
  if (!values_can_be_read(padded)) return;
  const at::Tensor segments = padded.cpu();
  const at::Tensor sequences = cu_seqlens.cpu();
  const auto* segment = segments.const_data_ptr<int32_t>();
  const auto* sequence = sequences.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(segment[0] == 0, "cu_seqlens_padded must start at 0, got ", segment[0]);
  for (int64_t i = 0; i + 1 < segments.size(0); ++i) {
    const int64_t room = int64_t{segment[i + 1]} - segment[i];
    const int64_t length = int64_t{sequence[i + 1]} - sequence[i];
    TORCH_CHECK_VALUE(room >= length, "cu_seqlens_padded must leave room for each sequence, got ",
                      "segment ", i, " of ", room, " tokens for a sequence of ", length);
  }
  const int64_t last = segment[segments.size(0) - 1];
  TORCH_CHECK_VALUE(last <= total_tokens,
                    "cu_seqlens_padded must end at or before total_tokens = ", total_tokens,
                    ", got ", last);
}

Segments segments_of(const at::Tensor& cu_seqlens,
                     const std::optional<at::Tensor>& cu_seqlens_padded, int64_t total_tokens) {
  const at::Tensor& offsets = cu_seqlens_padded.has_value() ? *cu_seqlens_padded : cu_seqlens;
  Segments segments;
  segments.seqlens = {offsets.const_data_ptr<int32_t>(), offsets.size(0) - 1};
  if (cu_seqlens_padded.has_value()) {
    segments.cu_seqlens_real = cu_seqlens.const_data_ptr<int32_t>();
  }
  segments.total_tokens = total_tokens;
  return segments;
}

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
                    ", filled up to segment_multiple if there is one, but those on the device sum "
                    "to more");
}

bool is_capturing([[maybe_unused]] const at::Tensor& tensor) {
#ifdef CUSEQ_WITH_CUDA
  if (tensor.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(
        cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(tensor.device().index()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

bool switch_from_environment(const char* name, bool fallback) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  const bool on = std::strcmp(value, "1") == 0;
  TORCH_CHECK_VALUE(on || std::strcmp(value, "0") == 0, name, " must be 0 or 1, got '", value, "'");
  return on;
}

int64_t limit_from_environment(const char* name, int64_t fallback, int64_t least) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  char* end = nullptr;
  const int64_t limit = std::strtoll(value, &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && limit >= least, name, " must be a number of at least ", least,
                    ", got '", value, "'");
  return limit;
}

at::TensorOptions int32_on(const at::Tensor& like) {
  return at::TensorOptions().dtype(at::kInt).device(like.device());
}

#ifdef CUSEQ_WITH_CUDA
void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) {
    const cudaDeviceProp* gpu = at::cuda::getCurrentDeviceProperties();
    TORCH_CHECK(false, "cuseq was built for the CUDA architectures ", CUSEQ_CUDA_ARCHS,
                " and has no code for ", gpu->name, " (sm_", gpu->major, gpu->minor,
                "); rebuild it with CUSEQ_CUDA_ARCHS=", gpu->major, gpu->minor);
  }
  C10_CUDA_CHECK(error);
}
#endif

}  // namespace cuseq
