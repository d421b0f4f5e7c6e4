#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "cuseq/macros.h"
#include "cuseq/seqlens.h"
#include "ops/float_type.h"

// Checks shared by the ops. A message states the argument, the rule and the value.
namespace cuseq {

void check_integer(const at::Tensor& tensor, const char* name);
void check_vector(const at::Tensor& tensor, const char* name);
// Return the dtype; raise TypeError unless it is one that kernels take.
FloatType float_type(const at::Tensor& tensor, const char* name);
void check_offsets(const at::Tensor& cu_seqlens);
void check_tokens(int64_t total_tokens);
void check_max_seqs(int64_t max_seqs);
CUSEQ_API void check_window(std::optional<int64_t> window);

// Values on the host are always checked. Checking values on the device synchronises, so it is done
// only with CUSEQ_CHECK=1 and never during a graph capture. total_tokens < 0 means "not given".
bool values_can_be_read(const at::Tensor& tensor);
void check_length_values(const at::Tensor& lengths, int64_t total_tokens);
void check_offset_values(const at::Tensor& cu_seqlens, int64_t total_tokens);
// Check lengths or offsets, as `is_cu_seqlens` says, and their values.
void check_source(const at::Tensor& source, int64_t total_tokens, bool is_cu_seqlens);

// Return whether values on a device are checked, which synchronises: CUSEQ_CHECK=1. Raise
// ValueError for a value other than 0 or 1.
CUSEQ_API bool device_checks_enabled();

// Check lengths or offsets on the host. Return the sum of the lengths, or the last offset.
CUSEQ_API int64_t tokens_of(const at::Tensor& source, bool is_cu_seqlens);

// Check the offsets of padded segments, if given: each segment must be at least as long as its
// sequence in cu_seqlens.
void check_padded_offsets(const std::optional<at::Tensor>& cu_seqlens_padded,
                          const at::Tensor& cu_seqlens, int64_t total_tokens);
Segments segments_of(const at::Tensor& cu_seqlens,
                     const std::optional<at::Tensor>& cu_seqlens_padded, int64_t total_tokens);

// Return whether the current stream of the tensor's device is being captured into a CUDA graph.
bool is_capturing(c10::Device device);
bool is_capturing(const at::Tensor& tensor);

// Read an environment variable that is 0 or 1.
bool switch_from_environment(const char* name, bool fallback);

// Read a number from an environment variable, such as a limit in bytes. By default there is no
// limit.
int64_t limit_from_environment(const char* name,
                               int64_t fallback = std::numeric_limits<int64_t>::max(),
                               int64_t least = 0);

at::TensorOptions int32_on(const at::Tensor& like);

}  // namespace cuseq
