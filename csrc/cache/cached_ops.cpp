#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <array>

#include "cache/cached_op.h"
#include "cuseq/cache.h"
#include "cuseq/ops.h"
#include "ops/checks.h"
#include "ops/mask_options.h"

// The cached ops decompose into the pure ones. If a call is traced or runs under a dispatch mode
// they only do that, so that a cached tensor never becomes the output of an op in a traced graph.
namespace cuseq {
namespace {

using at::Tensor;
using OptionalInt = std::optional<int64_t>;
using OptionalSymInt = std::optional<c10::SymInt>;
using OptionalTensor = std::optional<Tensor>;

OptionalTensor other(const CacheQuery& query, size_t index) {
  return query.others[index] == nullptr ? std::nullopt : OptionalTensor(*query.others[index]);
}

// Return the mask options that a query was made from. Offsets of lengths are cached separately,
// because other ops need them too.
MaskOptions options_of(const CacheQuery& query) {
  const CacheParameters& p = query.parameters;
  return {p.from_cu_seqlens ? query.key : cached_cu_seqlens(query.key),
          p.total_tokens,
          /*from_cu_seqlens=*/true,
          p.causal,
          p.window == 0 ? std::nullopt : OptionalInt(p.window),
          other(query, 0),
          other(query, 1)};
}

OptionalSymInt row_length_of(const CacheParameters& parameters) {
  const bool one_row = parameters.row_length == parameters.total_tokens;
  return one_row ? std::nullopt : OptionalSymInt(parameters.row_length);
}

CachedTensors compute_segment_rows(const CacheQuery& query) {
  const auto rows = segment_rows(query.key, *query.others[1], query.parameters.total_tokens);
  return {std::get<0>(rows), std::get<1>(rows)};
}

CachedTensors compute_offsets_with_room(const CacheQuery& query) {
  const auto [first, count, room] = query.parameters.sequences;
  const Tensor own = query.key.narrow(0, first, count + 1);
  return {at::cat({own, own.narrow(0, count, 1).expand({room - count})})};
}

CachedTensors compute_dense_mask(const CacheQuery& query) {
  const CacheParameters& p = query.parameters;
  return {dense_mask(options_of(query), row_length_of(p), p.dtype, p.finite)};
}

CachedTensors compute_block_mask(const CacheQuery& query) {
  const CacheParameters& p = query.parameters;
  const Tensor ranges = mask_ranges(options_of(query));
  auto tensors = block_mask(ranges, row_length_of(p), p.block_size[0], p.block_size[1]);
  tensors.push_back(ranges);
  return {tensors.begin(), tensors.end()};
}

int64_t rows_of(const CacheParameters& parameters) {
  return parameters.row_length == 0 ? 1 : parameters.total_tokens / parameters.row_length;
}

int64_t bytes_of_dense_mask(const CacheQuery& query) {
  const CacheParameters& p = query.parameters;
  return dense_mask_bytes(rows_of(p), p.row_length, p.dtype);
}

int64_t bytes_of_block_mask(const CacheQuery& query) {
  const CacheParameters& p = query.parameters;
  return block_mask_bytes(rows_of(p), p.row_length, p.block_size[0], p.block_size[1]);
}

using Turn = CachedOpRow::Turn;
using Query = const CacheQuery&;

constexpr std::array<CachedOpRow, kCachedOps> kRows{{
    {CachedOp::kCuSeqlens, "cu_seqlens", Turn::kOffsets,
     [](Query query) -> CachedTensors { return {cu_seqlens(query.key)}; }, nullptr},
    {CachedOp::kHostCopy, "host_copy", Turn::kOffsets,
     [](Query query) -> CachedTensors { return {query.key.cpu()}; }, nullptr},
    {CachedOp::kOffsetsWithRoom, "offsets_with_room", Turn::kOffsets, &compute_offsets_with_room,
     nullptr},
    {CachedOp::kPositionIds, "position_ids", Turn::kTokens,
     [](Query query) -> CachedTensors {
       return {position_ids(query.key, query.parameters.total_tokens)};
     },
     nullptr},
    {CachedOp::kSeqIds, "seq_ids", Turn::kTokens,
     [](Query query) -> CachedTensors {
       return {seq_ids(query.key, query.parameters.total_tokens)};
     },
     nullptr},
    {CachedOp::kSegmentRows, "segment_rows", Turn::kTokens, &compute_segment_rows, nullptr},
    {CachedOp::kMaskRanges, "mask_ranges", Turn::kTokens,
     [](Query query) -> CachedTensors { return {mask_ranges(options_of(query))}; }, nullptr},
    {CachedOp::kDenseMask, "dense_mask", Turn::kMasksAndObjects, &compute_dense_mask,
     &bytes_of_dense_mask},
    {CachedOp::kBlockMask, "block_mask", Turn::kMasksAndObjects, &compute_block_mask,
     &bytes_of_block_mask},
    {CachedOp::kObject, "object", Turn::kMasksAndObjects, nullptr, nullptr},
}};

constexpr bool rows_are_in_order() {
  for (size_t i = 0; i < kCachedOps; ++i) {
    if (kRows[i].op != static_cast<CachedOp>(i)) return false;
  }
  return true;
}
static_assert(rows_are_in_order());

// Return a query with the fields that every kind of mask with these options shares.
CacheQuery query_of(const MaskOptions& options, CachedOp op) {
  const auto pointer = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? &*tensor : nullptr;
  };
  CacheQuery query{options.source, op, options.source.device()};
  query.parameters.total_tokens = options.total_tokens.expect_int();
  query.parameters.from_cu_seqlens = options.from_cu_seqlens;
  query.parameters.causal = options.causal;
  query.others = {pointer(options.spans), pointer(options.cu_seqlens_padded)};
  check_tokens(query.parameters.total_tokens);
  check_window(options.window);
  // A window at least as long as the row has no effect.
  if (options.window.has_value() && *options.window < query.parameters.total_tokens) {
    query.parameters.window = *options.window;
  }
  return query;
}

Tensor pure_per_token(const char* name, const Tensor& lengths, const c10::SymInt& total_tokens) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const Tensor&, c10::SymInt)>()
      .call(lengths, total_tokens);
}

Tensor cached_cu_seqlens_op(const Tensor& lengths) { return cached_cu_seqlens(lengths); }

template <typename Cached>
Tensor cached_per_token(const char* name, const Tensor& lengths, const c10::SymInt& total_tokens,
                        const Cached& cached) {
  if (const auto tokens = total_tokens.maybe_as_int()) return cached(lengths, *tokens);
  return pure_per_token(name, lengths, total_tokens);
}

Tensor cached_position_ids_op(const Tensor& lengths, c10::SymInt total_tokens) {
  return cached_per_token("cuseq::position_ids", lengths, total_tokens, cached_position_ids);
}

Tensor cached_seq_ids_op(const Tensor& lengths, c10::SymInt total_tokens) {
  return cached_per_token("cuseq::seq_ids", lengths, total_tokens, cached_seq_ids);
}

Tensor cached_mask_ranges_op(const Tensor& source, c10::SymInt total_tokens, bool from_cu_seqlens,
                             bool causal, OptionalInt window, const OptionalTensor& spans,
                             const OptionalTensor& cu_seqlens_padded) {
  return cached_mask_ranges(
      {source, total_tokens, from_cu_seqlens, causal, window, spans, cu_seqlens_padded});
}

Tensor cached_dense_mask_op(const Tensor& source, c10::SymInt total_tokens, bool from_cu_seqlens,
                            bool causal, OptionalInt window, const OptionalTensor& spans,
                            const OptionalTensor& cu_seqlens_padded, OptionalSymInt row_length,
                            std::optional<at::ScalarType> dtype, bool finite) {
  return cached_dense_mask(
      {source, total_tokens, from_cu_seqlens, causal, window, spans, cu_seqlens_padded}, row_length,
      dtype, finite);
}

std::vector<Tensor> cached_block_mask_op(const Tensor& source, c10::SymInt total_tokens,
                                         bool from_cu_seqlens, bool causal, OptionalInt window,
                                         const OptionalTensor& spans,
                                         const OptionalTensor& cu_seqlens_padded,
                                         OptionalSymInt row_length, int64_t query_block,
                                         int64_t key_block) {
  return cached_block_mask(
      {source, total_tokens, from_cu_seqlens, causal, window, spans, cu_seqlens_padded}, row_length,
      query_block, key_block);
}

// Return whether the sizes are known numbers. While compilers trace dynamic sizes they are symbols,
// which cannot be cache keys.
bool is_concrete(const MaskOptions& options, const OptionalSymInt& row_length) {
  return options.total_tokens.maybe_as_int().has_value() &&
         (!row_length.has_value() || row_length->maybe_as_int().has_value());
}

OptionalInt concrete(const OptionalSymInt& number) {
  return number.has_value() ? OptionalInt(number->expect_int()) : std::nullopt;
}

CachedValuePtr value_of(CachedTensors tensors) {
  return std::make_shared<const CachedValue>(CachedValue{std::move(tensors), nullptr});
}

}  // namespace

const CachedOpRow& row_of(CachedOp op) { return kRows[static_cast<size_t>(op)]; }

const char* name_of(CachedOp op) { return row_of(op).name; }

CachedValuePtr cached_value(const CacheQuery& query) {
  const CachedOpRow& row = row_of(query.op);
  IdentityCache& cache = IdentityCache::instance();
  if (!cache.usable_for(query)) {
    cache.count_bypass();
    return value_of(row.compute(query));
  }
  if (auto hit = cache.find(query)) return hit;
  Identities before = identities_of(query);
  if (row.bytes != nullptr) cache.make_room_for(row.bytes(query));
  CachedValuePtr value = value_of(row.compute(query));
  // A tensor made in inference mode could not be saved for backward by a later training step.
  if (!c10::InferenceMode::is_enabled()) cache.insert(query, std::move(before), value);
  return value;
}

Tensor cached_cu_seqlens(const Tensor& lengths) {
  return cached_value({lengths, CachedOp::kCuSeqlens, lengths.device()})->tensors[0];
}

Tensor cached_position_ids(const Tensor& lengths, int64_t total_tokens) {
  return cached_value({lengths, CachedOp::kPositionIds, lengths.device(), {total_tokens}})
      ->tensors[0];
}

Tensor cached_seq_ids(const Tensor& lengths, int64_t total_tokens) {
  return cached_value({lengths, CachedOp::kSeqIds, lengths.device(), {total_tokens}})->tensors[0];
}

Tensor cached_on_host(const Tensor& on_device) {
  return cached_value({on_device, CachedOp::kHostCopy, at::kCPU})->tensors[0];
}

std::optional<Tensor> remembered_on_host(const Tensor& on_device) {
  if (on_device.is_cpu()) return on_device;
  IdentityCache& cache = IdentityCache::instance();
  const CacheQuery query{on_device, CachedOp::kHostCopy, at::kCPU};
  const auto value = cache.usable_for(query) ? cache.find_at_once(query) : nullptr;
  return value == nullptr ? std::nullopt : std::optional<Tensor>(value->tensors[0]);
}

void remember_on_host(const Tensor& on_device, const Tensor& on_host) {
  IdentityCache& cache = IdentityCache::instance();
  const CacheQuery query{on_device, CachedOp::kHostCopy, at::kCPU};
  if (!cache.usable_for(query) || cache.find_at_once(query) != nullptr) return;
  // A backward that runs after the scope needs the copy too.
  cache.insert(query, identities_of(query), value_of({on_host}), /*outlives_scopes=*/true);
}

std::tuple<Tensor, Tensor> cached_segment_rows(const Tensor& cu_seqlens,
                                               const Tensor& cu_seqlens_padded,
                                               int64_t total_tokens) {
  CacheQuery query{cu_seqlens, CachedOp::kSegmentRows, cu_seqlens.device(), {total_tokens}};
  query.others[1] = &cu_seqlens_padded;
  const auto value = cached_value(query);
  return {value->tensors[0], value->tensors[1]};
}

Tensor cached_offsets_with_room(const Tensor& cu_seqlens, int64_t first, int64_t count,
                                int64_t room) {
  CacheQuery query{cu_seqlens, CachedOp::kOffsetsWithRoom, cu_seqlens.device()};
  query.parameters.sequences = {first, count, room};
  return cached_value(query)->tensors[0];
}

CacheQuery mask_ranges_query(const MaskOptions& options) {
  return query_of(options, CachedOp::kMaskRanges);
}

CacheQuery dense_mask_query(const MaskOptions& options, OptionalInt row_length,
                            std::optional<at::ScalarType> dtype, bool finite) {
  CacheQuery query = query_of(options, CachedOp::kDenseMask);
  query.parameters.row_length = row_length.value_or(query.parameters.total_tokens);
  query.parameters.dtype = dtype.value_or(at::kBool);
  check_dense_mask(query.parameters.total_tokens, row_length, query.parameters.dtype);
  query.parameters.finite = finite && query.parameters.dtype != at::kBool;
  return query;
}

CacheQuery block_mask_query(const MaskOptions& options, OptionalInt row_length, int64_t query_block,
                            int64_t key_block) {
  CacheQuery query = query_of(options, CachedOp::kBlockMask);
  check_block_mask(query.parameters.total_tokens, row_length, query_block, key_block);
  query.parameters.row_length = row_length.value_or(query.parameters.total_tokens);
  query.parameters.block_size = {query_block, key_block};
  return query;
}

Tensor cached_mask_ranges(const MaskOptions& options) {
  if (!is_concrete(options, std::nullopt)) return mask_ranges(options);
  return cached_value(mask_ranges_query(options))->tensors[0];
}

Tensor cached_dense_mask(const MaskOptions& options, const OptionalSymInt& row_length,
                         std::optional<at::ScalarType> dtype, bool finite) {
  if (!is_concrete(options, row_length)) return dense_mask(options, row_length, dtype, finite);
  return cached_value(dense_mask_query(options, concrete(row_length), dtype, finite))->tensors[0];
}

std::vector<Tensor> cached_block_mask(const MaskOptions& options, const OptionalSymInt& row_length,
                                      int64_t query_block, int64_t key_block) {
  if (!is_concrete(options, row_length)) {
    return block_mask(mask_ranges(options), row_length, query_block, key_block);
  }
  const auto value =
      cached_value(block_mask_query(options, concrete(row_length), query_block, key_block));
  return {value->tensors.begin(), value->tensors.end() - 1};  // without the ranges
}

static void register_cached_ops(torch::Library& m) {
  m.impl("cached_cu_seqlens", TORCH_FN(cached_cu_seqlens_op));
  m.impl("cached_position_ids", TORCH_FN(cached_position_ids_op));
  m.impl("cached_seq_ids", TORCH_FN(cached_seq_ids_op));
  m.impl("cached_mask_ranges", TORCH_FN(cached_mask_ranges_op));
  m.impl("cached_dense_mask", TORCH_FN(cached_dense_mask_op));
  m.impl("cached_block_mask", TORCH_FN(cached_block_mask_op));
}

TORCH_LIBRARY_IMPL(cuseq, CompositeImplicitAutograd, m) { register_cached_ops(m); }

// functorch and torch.jit.trace remove themselves from the dispatch keys before the composite
// kernel runs. Registering here, before them, keeps them visible.
TORCH_LIBRARY_IMPL(cuseq, FuncTorchDynamicLayerFrontMode, m) { register_cached_ops(m); }
TORCH_LIBRARY_IMPL(cuseq, Tracer, m) { register_cached_ops(m); }

}  // namespace cuseq
