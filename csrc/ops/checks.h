#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "cuseq/macros.h"
#include "cuseq/seqlens.h"

// Checks that the ops share. A message says the argument, the rule and the value.
namespace cuseq {

void check_integer(const at::Tensor& tensor, const char* name);
void check_vector(const at::Tensor& tensor, const char* name);
void check_offsets(const at::Tensor& cu_seqlens);
void check_tokens(int64_t total_tokens);
void check_max_seqs(int64_t max_seqs);
CUSEQ_API void check_window(std::optional<int64_t> window);

// Host values are always checked. Values on the device cost a stall, which CUSEQ_CHECK=1 pays.
// total_tokens < 0 stands for "not given".
bool values_can_be_read(const at::Tensor& tensor);
void check_length_values(const at::Tensor& lengths, int64_t total_tokens);
void check_offset_values(const at::Tensor& cu_seqlens, int64_t total_tokens);
// Either of the two, as `is_cu_seqlens` says, with their values.
void check_source(const at::Tensor& source, int64_t total_tokens, bool is_cu_seqlens);

// Whether values on a device are checked, which waits for them: CUSEQ_CHECK=1. Raises ValueError
// for a value that is neither 0 nor 1.
CUSEQ_API bool device_checks_enabled();

// Checks lengths, or offsets, on the host and counts their tokens.
CUSEQ_API int64_t tokens_of(const at::Tensor& source, bool is_cu_seqlens);

// Offsets of segments in which the sequences of cu_seqlens lie, if they are longer than those.
void check_padded_offsets(const std::optional<at::Tensor>& cu_seqlens_padded,
                          const at::Tensor& cu_seqlens, int64_t total_tokens);
Segments segments_of(const at::Tensor& cu_seqlens,
                     const std::optional<at::Tensor>& cu_seqlens_padded, int64_t total_tokens);

// True while the current stream of the tensor's device is being captured into a CUDA graph.
bool is_capturing(c10::Device device);
bool is_capturing(const at::Tensor& tensor);

// An environment variable that is 0 or 1.
bool switch_from_environment(const char* name, bool fallback);

// The number of an environment variable, such as a limit in bytes; without one there is no limit.
int64_t limit_from_environment(const char* name,
                               int64_t fallback = std::numeric_limits<int64_t>::max(),
                               int64_t least = 0);

at::TensorOptions int32_on(const at::Tensor& like);

}  // namespace cuseq
