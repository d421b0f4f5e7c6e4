#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuseq/macros.h"

// Rotary position embedding, for programs that load libcuseq without Python. The options and the
// errors are those of cuseq.apply_rope in Python.
namespace cuseq {

// Strings and sections are not owned: they must outlive the call that takes the options.
struct RopeOptions {
  at::Tensor cos;
  at::Tensor sin;
  std::optional<at::Tensor> cu_seqlens;
  std::optional<at::Tensor> host_meta;
  std::optional<at::Tensor> position_ids;
  c10::SymInt offset = 0;
  std::string_view table = "position";
  std::string_view qkv_format = "thd";
  bool interleaved = false;
  std::optional<int64_t> rotary_dim;
  at::OptionalIntArrayRef mrope_section;
  bool mrope_interleaved = false;
  int64_t cp_size = 1;
  int64_t cp_rank = 0;
  bool inverse = false;
};

// `tensors` is the query, or the query and the key.
CUSEQ_API std::vector<at::Tensor> apply_rope(at::TensorList tensors, const RopeOptions& options);
CUSEQ_API void apply_rope_(at::TensorList tensors, const RopeOptions& options);

// Return the rotated tensors, and for each of them the reciprocal root mean square of every head.
CUSEQ_API std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> apply_qk_norm_rope(
    at::TensorList tensors, at::TensorList weights, double eps, double weight_offset,
    const RopeOptions& options);
CUSEQ_API void apply_qk_norm_rope_(at::TensorList tensors, at::TensorList weights, double eps,
                                   double weight_offset, const RopeOptions& options);

}  // namespace cuseq
