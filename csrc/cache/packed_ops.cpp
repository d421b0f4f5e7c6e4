#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "ops/checks.h"

// The cached ops decompose into the pure ones. Where a call is traced or watched they do nothing
// else, so that a cached tensor never becomes the output of an op in somebody's graph.
namespace cuseq {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr DispatchKeySet kWatchingModes = DispatchKeySet(
    {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
     DispatchKey::PreDispatch, DispatchKey::Functionalize, DispatchKey::Tracer,
     DispatchKey::FuncTorchDynamicLayerFrontMode});

constexpr DispatchKeySet kNotPlainData = DispatchKeySet(
    {DispatchKey::Python, DispatchKey::Fake, DispatchKey::Functionalize,
     DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::ZeroTensor});

bool may_use_cache(const at::Tensor& key) {
  return IdentityCache::instance().enabled() && !c10::impl::dispatch_mode_enabled() &&
         !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchingModes) &&
         !key.key_set().has_any(kNotPlainData) && !key.is_meta() && key.has_storage() &&
         !key.is_inference() && !is_capturing(key);
}

template <typename Compute>
at::Tensor cached(const at::Tensor& key, CachedOp op, int64_t parameter, const Compute& compute) {
  IdentityCache& cache = IdentityCache::instance();
  const CacheQuery query{key, op, key.device(), parameter};
  if (auto hit = cache.find(query)) return *std::move(hit);
  const int64_t version = key._version();
  at::Tensor value = compute();
  // A tensor made in inference mode could not be saved by a later training step.
  if (!c10::InferenceMode::is_enabled()) cache.insert(query, version, value);
  return value;
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

template <typename Compute>
at::Tensor cached_or_pure(const at::Tensor& lengths, CachedOp op, int64_t parameter,
                          const Compute& compute) {
  if (!may_use_cache(lengths)) {
    IdentityCache::instance().count_bypass();
    return compute();
  }
  return cached(lengths, op, parameter, compute);
}

}  // namespace

at::Tensor packed_cu_seqlens(const at::Tensor& lengths) {
  return cached_or_pure(lengths, CachedOp::kCuSeqlens, 0, [&] { return cu_seqlens(lengths); });
}

at::Tensor packed_position_ids(const at::Tensor& lengths, int64_t total_tokens) {
  return cached_or_pure(lengths, CachedOp::kPositionIds, total_tokens,
                        [&] { return position_ids(lengths, total_tokens); });
}

at::Tensor packed_seq_ids(const at::Tensor& lengths, int64_t total_tokens) {
  return cached_or_pure(lengths, CachedOp::kSeqIds, total_tokens,
                        [&] { return seq_ids(lengths, total_tokens); });
}

static void register_packed_ops(torch::Library& m) {
  m.impl("packed_cu_seqlens", TORCH_FN(packed_cu_seqlens_op));
  m.impl("packed_position_ids", TORCH_FN(packed_position_ids_op));
  m.impl("packed_seq_ids", TORCH_FN(packed_seq_ids_op));
}

TORCH_LIBRARY_IMPL(cuseq, CompositeImplicitAutograd, m) { register_packed_ops(m); }

// functorch would unwrap tensors and hide itself before the composite kernel runs: here, in front
// of it, a transform can still be seen.
TORCH_LIBRARY_IMPL(cuseq, FuncTorchDynamicLayerFrontMode, m) { register_packed_ops(m); }

}  // namespace cuseq
