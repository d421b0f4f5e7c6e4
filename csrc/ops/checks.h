#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "kernels/kernels.h"

#ifdef CUSEQ_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#endif

// Checks and launches shared by the ops. A message says the argument, the rule and the value.
namespace cuseq {

void check_integer(const at::Tensor& tensor, const char* name);
void check_vector(const at::Tensor& tensor, const char* name);
void check_offsets(const at::Tensor& cu_seqlens);
void check_tokens(int64_t total_tokens);

// Host values are always checked. Values on the device cost a stall, which CUSEQ_CHECK=1 pays.
// total_tokens < 0 stands for "not given".
bool values_can_be_read(const at::Tensor& tensor);
void check_length_values(const at::Tensor& lengths, int64_t total_tokens);
void check_offset_values(const at::Tensor& cu_seqlens, int64_t total_tokens);

// Offsets of segments in which the sequences of cu_seqlens lie, if they are longer than those.
void check_padded_offsets(const std::optional<at::Tensor>& cu_seqlens_padded,
                          const at::Tensor& cu_seqlens, int64_t total_tokens);
Segments segments_of(const at::Tensor& cu_seqlens,
                     const std::optional<at::Tensor>& cu_seqlens_padded, int64_t total_tokens);

// Raises what `status` of a host_meta says is wrong.
void check_layout_status(int32_t status, int64_t num_seqs, int64_t total_tokens);

// The numbers of a host_meta, waited for and with a good status.
const int32_t* read_host_meta(const at::Tensor& host_meta);

// True while the current stream of the tensor's device is being captured into a CUDA graph.
bool is_capturing(const at::Tensor& tensor);

// An environment variable that is 0 or 1.
bool switch_from_environment(const char* name, bool fallback);

// The number of an environment variable, such as a limit in bytes; without one there is no limit.
int64_t limit_from_environment(const char* name,
                               int64_t fallback = std::numeric_limits<int64_t>::max(),
                               int64_t least = 0);

at::TensorOptions int32_on(const at::Tensor& like);

#ifdef CUSEQ_WITH_CUDA
void check_launch();

// Runs the kernel of this name where the tensor lies.
#define CUSEQ_RUN(kernel, where, args)                               \
  do {                                                               \
    if ((where).is_cuda()) {                                         \
      const c10::cuda::CUDAGuard guard((where).device());            \
      cuda::kernel(args, at::cuda::getCurrentCUDAStream().stream()); \
      check_launch();                                                \
    } else {                                                         \
      cpu::kernel(args);                                             \
    }                                                                \
  } while (false)
#else
#define CUSEQ_RUN(kernel, where, args) cpu::kernel(args)
#endif

}  // namespace cuseq
