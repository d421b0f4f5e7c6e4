#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string_view>

#include "cuseq/rope.h"
#include "ops/dispatch.h"
#include "ops/rope.h"
#include "ops/types.h"

// Conversion, shared by the rotary ops, of their schemas' flat lists of options to checked kernel
// arguments.
namespace cuseq {

// Check everything before any memory is accessed, and fill in all arguments except the output
// pointers.
RopeArgs plan_rope(at::TensorList tensors, const RopeOptions& options);

// Read the strides of batch, token and head, in elements.
void read_strides(const at::Tensor& tensor, std::string_view qkv_format, int64_t (&strides)[3]);

// Make the kernel write to `output`, which may be the input.
void write_to(const at::Tensor& output, const RopeOptions& options, RopeTensor& tensor);

// The signature (front..., every option), in the order of the schemas.
template <typename Return, typename... Front>
using RopeSignature = Return(Front..., const at::Tensor&, const at::Tensor&,
                             const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                             const std::optional<at::Tensor>&, c10::SymInt, std::string_view,
                             std::string_view, bool, std::optional<int64_t>,
                             at::OptionalIntArrayRef, bool, int64_t, int64_t, bool);

// Adapt function(options, front...) to a kernel with the schema (front..., every option).
template <auto function>
struct RopeKernel;

template <typename Return, typename... Front, Return (*function)(const RopeOptions&, Front...)>
struct RopeKernel<function> {
  static Return call(Front... front, const at::Tensor& cos, const at::Tensor& sin,
                     const std::optional<at::Tensor>& cu_seqlens,
                     const std::optional<at::Tensor>& host_meta,
                     const std::optional<at::Tensor>& position_ids, c10::SymInt offset,
                     std::string_view table, std::string_view qkv_format, bool interleaved,
                     std::optional<int64_t> rotary_dim, at::OptionalIntArrayRef mrope_section,
                     bool mrope_interleaved, int64_t cp_size, int64_t cp_rank, bool inverse) {
    return function(
        {cos, sin, cu_seqlens, host_meta, position_ids, std::move(offset), table, qkv_format,
         interleaved, rotary_dim, mrope_section, mrope_interleaved, cp_size, cp_rank, inverse},
        front...);
  }
};

template <typename Return, typename... Front>
auto find_rope_op(const char* name) {
  return find_op<RopeSignature<Return, Front...>>(name);
}

template <typename Op, typename... Front>
decltype(auto) call_rope(const Op& op, const RopeOptions& options, const Front&... front) {
  return op.call(front..., options.cos, options.sin, options.cu_seqlens, options.host_meta,
                 options.position_ids, options.offset, options.table, options.qkv_format,
                 options.interleaved, options.rotary_dim, options.mrope_section,
                 options.mrope_interleaved, options.cp_size, options.cp_rank, options.inverse);
}

// Options saved on an autograd node. Owns the strings and sections, so that they outlive the call.
class SavedRopeOptions {
 public:
  static void save(torch::autograd::AutogradContext* ctx, const RopeOptions& options,
                   torch::autograd::variable_list saved);

  // `first` is the index of the options' first tensor in `saved`.
  SavedRopeOptions(torch::autograd::AutogradContext* ctx,
                   const torch::autograd::variable_list& saved, size_t first);
  SavedRopeOptions(const SavedRopeOptions&) = delete;  // `options` points into this object

  RopeOptions options;

 private:
  std::vector<int64_t> numbers_;
};

}  // namespace cuseq
