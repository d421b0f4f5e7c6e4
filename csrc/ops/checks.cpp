#include "ops/checks.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "cuseq/seqlens.h"
#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "ops/types.h"

#ifdef CUSEQ_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace cuseq {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

}  // namespace

bool device_checks_enabled() {
  static const bool enabled = switch_from_environment("CUSEQ_CHECK", false);
  return enabled;
}

bool values_can_be_read(const Tensor& tensor) {
  return tensor.is_cpu() || (device_checks_enabled() && !is_capturing(tensor));
}

void check_integer(const Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, name,
                   " must be int32 or int64, got ", dtype_name(tensor.scalar_type()));
}

void check_vector(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 1, name, " must have one dimension, got shape ",
                    tensor.sizes());
  check_integer(tensor, name);
  TORCH_CHECK_VALUE(tensor.size(0) < kMaxTokens, name, " must have fewer than 2^31 entries, got ",
                    tensor.size(0));
}

FloatType float_type(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return FloatType::kFloat32;
    case at::kDouble:
      return FloatType::kFloat64;
    case at::kBFloat16:
      return FloatType::kBFloat16;
    case at::kHalf:
      return FloatType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, name, " must be float32, float64, bfloat16 or float16, got ",
                       dtype_name(tensor.scalar_type()));
  }
}

void check_offsets(const Tensor& cu_seqlens) {
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
                    "cu_seqlens must have shape [n_seqs + 1], got ", cu_seqlens.sizes());
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, "cu_seqlens must be int32, got ",
                   dtype_name(cu_seqlens.scalar_type()));
  TORCH_CHECK_VALUE(cu_seqlens.is_contiguous(), "cu_seqlens must be contiguous, got stride ",
                    cu_seqlens.strides());
}

void check_tokens(int64_t total_tokens) {
  TORCH_CHECK_VALUE(total_tokens >= 0 && total_tokens <= kMaxTokens,
                    "total_tokens must lie in [0, 2^31 - 1], got ", total_tokens);
}

void check_max_seqs(int64_t max_seqs) {
  TORCH_CHECK_VALUE(max_seqs >= 0 && max_seqs <= kMaxTokens,
                    "max_seqs must lie in [0, 2^31 - 1], got ", max_seqs);
}

void check_window(std::optional<int64_t> window) {
  TORCH_CHECK_VALUE(!window.has_value() || *window >= 1,
                    "window must be None or at least 1, the keys that a query sees with itself "
                    "included, got ",
                    window.value_or(0));
}

void check_length_values(const Tensor& lengths, int64_t total_tokens) {
  if (!values_can_be_read(lengths)) return;
  const Tensor host = host_values(lengths);
  const int64_t* values = host.const_data_ptr<int64_t>();
  int64_t sum = 0;
  for (int64_t i = 0; i < host.numel(); ++i) {
    TORCH_CHECK_VALUE(values[i] >= 0, "lengths must not be negative, got lengths[", i,
                      "] = ", values[i]);
    // Compared before adding, so that the sum cannot overflow.
    TORCH_CHECK_VALUE(values[i] <= kMaxTokens - sum,
                      "lengths must sum to at most 2^31 - 1 tokens, offsets are int32, but "
                      "lengths[",
                      i, "] = ", values[i], " comes after ", sum, " tokens");
    sum += values[i];
  }
  TORCH_CHECK_VALUE(total_tokens < 0 || sum <= total_tokens, "lengths must sum to at most ",
                    "total_tokens = ", total_tokens, ", got ", sum);
}

void check_offset_values(const Tensor& cu_seqlens, int64_t total_tokens) {
  if (!values_can_be_read(cu_seqlens) || cu_seqlens.numel() == 0) return;
  const Tensor host = host_values(cu_seqlens);
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

void check_source(const Tensor& source, int64_t total_tokens, bool is_cu_seqlens) {
  check_vector(source, is_cu_seqlens ? "cu_seqlens" : "lengths");
  TORCH_CHECK_VALUE(!is_cu_seqlens || source.size(0) >= 1,
                    "cu_seqlens must have shape [n_seqs + 1], got ", source.sizes());
  if (is_cu_seqlens) {
    check_offset_values(source, total_tokens);
  } else {
    check_length_values(source, total_tokens);
  }
}

int64_t tokens_of(const Tensor& source, bool is_cu_seqlens) {
  TORCH_CHECK(source.is_cpu(), "tokens_of reads values on the host, got ", source.device());
  check_memory(source, is_cu_seqlens ? "cu_seqlens" : "lengths");
  check_source(source, /*total_tokens=*/-1, is_cu_seqlens);
  const Tensor counted = is_cu_seqlens ? source.slice(0, -1) : source;
  return *counted.sum().const_data_ptr<int64_t>();  // item() would be profiled as a wait
}

void check_padded_offsets(const OptionalTensor& cu_seqlens_padded, const Tensor& cu_seqlens,
                          int64_t total_tokens) {
  if (!cu_seqlens_padded.has_value()) return;
  const Tensor& padded = *cu_seqlens_padded;
  TORCH_CHECK_TYPE(padded.scalar_type() == at::kInt, "cu_seqlens_padded must be int32, got ",
                   dtype_name(padded.scalar_type()));
  TORCH_CHECK_VALUE(padded.sizes() == cu_seqlens.sizes() && padded.is_contiguous(),
                    "cu_seqlens_padded must be contiguous [n_seqs + 1 = ", cu_seqlens.size(0),
                    "], got shape ", padded.sizes());
  TORCH_CHECK_VALUE(padded.device() == cu_seqlens.device(),
                    "cu_seqlens_padded must lie where the lengths do, on ", cu_seqlens.device(),
                    ", got ", padded.device());
  if (!values_can_be_read(padded)) return;
  const Tensor segments = host_values(padded);
  const Tensor sequences = host_values(cu_seqlens);
  const auto* segment = segments.const_data_ptr<int64_t>();
  const auto* sequence = sequences.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(segment[0] == 0, "cu_seqlens_padded must start at 0, got ", segment[0]);
  for (int64_t i = 0; i + 1 < segments.size(0); ++i) {
    const int64_t room = segment[i + 1] - segment[i];
    const int64_t length = sequence[i + 1] - sequence[i];
    TORCH_CHECK_VALUE(room >= length, "cu_seqlens_padded must leave room for each sequence, got ",
                      "segment ", i, " of ", room, " tokens for a sequence of ", length);
  }
  const int64_t last = segment[segments.size(0) - 1];
  TORCH_CHECK_VALUE(last <= total_tokens,
                    "cu_seqlens_padded must end at or before total_tokens = ", total_tokens,
                    ", got ", last);
}

Segments segments_of(const Tensor& cu_seqlens, const OptionalTensor& cu_seqlens_padded,
                     int64_t total_tokens) {
  const Tensor& offsets = cu_seqlens_padded.has_value() ? *cu_seqlens_padded : cu_seqlens;
  Segments segments;
  segments.seqlens = {offsets.const_data_ptr<int32_t>(), offsets.size(0) - 1};
  if (cu_seqlens_padded.has_value()) {
    segments.cu_seqlens_real = cu_seqlens.const_data_ptr<int32_t>();
  }
  segments.total_tokens = total_tokens;
  return segments;
}

bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef CUSEQ_WITH_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

bool is_capturing(const at::Tensor& tensor) { return is_capturing(tensor.device()); }

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

at::TensorOptions int32_on(const Tensor& like) {
  return at::TensorOptions().dtype(at::kInt).device(like.device());
}

}  // namespace cuseq
