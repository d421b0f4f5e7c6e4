#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "cuseq/cache.h"
#include "cuseq/ops.h"

// The cached ops decompose into the pure ones. Where a call is traced or watched they do nothing
// else, so that a cached tensor never becomes the output of an op in somebody's graph.
namespace cuseq {
namespace {

at::Tensor compute(const CacheQuery& query) {
  switch (query.op) {
    case CachedOp::kCuSeqlens:
      return cu_seqlens(query.key);
    case CachedOp::kPositionIds:
      return position_ids(query.key, query.parameter);
    case CachedOp::kSeqIds:
      return seq_ids(query.key, query.parameter);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor pure_per_token(const char* name, const at::Tensor& lengths,
                          const c10::SymInt& total_tokens) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<at::Tensor(const at::Tensor&, c10::SymInt)>()
      .call(lengths, total_tokens);
}

at::Tensor packed_cu_seqlens_op(const at::Tensor& lengths) { return packed_cu_seqlens(lengths); }

template <typename Packed>
at::Tensor packed_per_token(const char* name, const at::Tensor& lengths,
                            const c10::SymInt& total_tokens, const Packed& packed) {
  if (const auto tokens = total_tokens.maybe_as_int()) return packed(lengths, *tokens);
  return pure_per_token(name, lengths, total_tokens);
}

at::Tensor packed_position_ids_op(const at::Tensor& lengths, c10::SymInt total_tokens) {
  return packed_per_token("cuseq::position_ids", lengths, total_tokens, packed_position_ids);
}

at::Tensor packed_seq_ids_op(const at::Tensor& lengths, c10::SymInt total_tokens) {
  return packed_per_token("cuseq::seq_ids", lengths, total_tokens, packed_seq_ids);
}

}  // namespace

at::Tensor packed(const CacheQuery& query) {
  IdentityCache& cache = IdentityCache::instance();
  if (!cache.usable_for(query.key)) {
    cache.count_bypass();
    return compute(query);
  }
  if (auto hit = cache.find(query)) return *std::move(hit);
  const int64_t version = query.key._version();
  at::Tensor value = compute(query);
  // A tensor made in inference mode could not be saved by a later training step.
  if (!c10::InferenceMode::is_enabled()) cache.insert(query, version, value);
  return value;
}

at::Tensor packed_cu_seqlens(const at::Tensor& lengths) {
  return packed({lengths, CachedOp::kCuSeqlens, lengths.device()});
}

at::Tensor packed_position_ids(const at::Tensor& lengths, int64_t total_tokens) {
  return packed({lengths, CachedOp::kPositionIds, lengths.device(), total_tokens});
}

at::Tensor packed_seq_ids(const at::Tensor& lengths, int64_t total_tokens) {
  return packed({lengths, CachedOp::kSeqIds, lengths.device(), total_tokens});
}

static void register_packed_ops(torch::Library& m) {
  m.impl("packed_cu_seqlens", TORCH_FN(packed_cu_seqlens_op));
  m.impl("packed_position_ids", TORCH_FN(packed_position_ids_op));
  m.impl("packed_seq_ids", TORCH_FN(packed_seq_ids_op));
}

TORCH_LIBRARY_IMPL(cuseq, CompositeImplicitAutograd, m) { register_packed_ops(m); }

// functorch and torch.jit.trace hide themselves before the composite kernel runs: here, in front of
// them, they can still be seen.
TORCH_LIBRARY_IMPL(cuseq, FuncTorchDynamicLayerFrontMode, m) { register_packed_ops(m); }
TORCH_LIBRARY_IMPL(cuseq, Tracer, m) { register_packed_ops(m); }

}  // namespace cuseq
