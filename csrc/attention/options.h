#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "cuseq/attention.h"
#include "ops/autograd.h"
#include "ops/dispatch.h"
#include "ops/types.h"

// Conversion between AttentionOptions and the flat list of arguments in the schemas.
namespace cuseq::attention {

// The signature (front..., every option), in the order of the schemas.
template <typename Return, typename... Front>
using Signature = Return(Front..., const Tensor&, const OptionalTensor&, bool, OptionalInt,
                         OptionalDouble, OptionalSymInt, const OptionalTensor&,
                         const OptionalTensor&, OptionalDouble, c10::string_view,
                         const OptionalTensor&, const OptionalTensor&, c10::string_view,
                         const OptionalTensor&, const OptionalTensor&);

// Adapt function(options, front...) to a kernel with such a signature.
template <auto function>
struct Kernel;

template <typename Return, typename... Front, Return (*function)(const AttentionOptions&, Front...)>
struct Kernel<function> {
  static Return call(Front... front, const Tensor& cu_seqlens, const OptionalTensor& host_meta,
                     bool causal, OptionalInt window, OptionalDouble scale,
                     OptionalSymInt max_seqlen_bound, const OptionalTensor& spans,
                     const OptionalTensor& cu_seqlens_padded, OptionalDouble softcap,
                     c10::string_view backend, const OptionalTensor& rank_rows,
                     const OptionalTensor& rank_meta, c10::string_view rank_group,
                     const OptionalTensor& tree_rows, const OptionalTensor& tree_meta) {
    return function({cu_seqlens, host_meta, causal, window, scale, std::move(max_seqlen_bound),
                     spans, cu_seqlens_padded, softcap, std::string(backend), rank_rows, rank_meta,
                     std::string(rank_group), tree_rows, tree_meta},
                    front...);
  }
};

template <typename Op, typename... Front>
decltype(auto) call_op(const Op& op, const AttentionOptions& options, const Front&... front) {
  return op.call(front..., options.cu_seqlens, options.host_meta, options.causal, options.window,
                 options.scale, options.max_seqlen_bound, options.spans, options.cu_seqlens_padded,
                 options.softcap, options.backend, options.rank_rows, options.rank_meta,
                 options.rank_group, options.tree_rows, options.tree_meta);
}

// Save `saved` and the options on an autograd node. The options' tensors follow those of `saved`.
inline void save_options(torch::autograd::AutogradContext* ctx, const AttentionOptions& options,
                         torch::autograd::variable_list saved) {
  saved.insert(saved.end(), {options.cu_seqlens, or_undefined(options.host_meta),
                             or_undefined(options.spans), or_undefined(options.cu_seqlens_padded),
                             or_undefined(options.rank_rows), or_undefined(options.rank_meta),
                             or_undefined(options.tree_rows), or_undefined(options.tree_meta)});
  ctx->save_for_backward(std::move(saved));
  ctx->saved_data["causal"] = options.causal;
  ctx->saved_data["window"] = options.window;
  ctx->saved_data["scale"] = options.scale;
  ctx->saved_data["max_seqlen_bound"] = options.max_seqlen_bound;
  ctx->saved_data["softcap"] = options.softcap;
  ctx->saved_data["backend"] = options.backend;
  ctx->saved_data["rank_group"] = options.rank_group;
}

// Return the saved options. `first` is the index of the options' first tensor in `saved`.
inline AttentionOptions saved_options(torch::autograd::AutogradContext* ctx,
                                      const torch::autograd::variable_list& saved, size_t first) {
  auto& data = ctx->saved_data;
  return {saved[first],
          or_nullopt(saved[first + 1]),
          data["causal"].toBool(),
          data["window"].toOptional<int64_t>(),
          data["scale"].toOptional<double>(),
          data["max_seqlen_bound"].toOptional<c10::SymInt>(),
          or_nullopt(saved[first + 2]),
          or_nullopt(saved[first + 3]),
          data["softcap"].toOptional<double>(),
          data["backend"].toStringRef(),
          or_nullopt(saved[first + 4]),
          or_nullopt(saved[first + 5]),
          data["rank_group"].toStringRef(),
          or_nullopt(saved[first + 6]),
          or_nullopt(saved[first + 7])};
}

}  // namespace cuseq::attention
