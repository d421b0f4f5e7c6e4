#include "ops/masks.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "cuseq/ops.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "ops/mask_options.h"
#include "ops/types.h"

namespace cuseq {
namespace {

// PyTorch's memory-efficient kernel needs mask lines that start at multiples of 8 elements, 16 in
// older releases, and copies other masks.
constexpr int64_t kLineAlignment = 16;

// The checked inputs of a mask.
struct MaskInputs {
  Tensor offsets;  // owns the memory that `rule` points to
  MaskRule rule;

  MaskInputs(const Tensor& source, int64_t total_tokens, bool from_cu_seqlens, bool causal,
             OptionalInt window, const OptionalTensor& spans, const OptionalTensor& padded,
             OptionalInt row_length) {
    check_tokens(total_tokens);
    check_window(window);
    if (from_cu_seqlens) {
      check_offsets(source);
      check_offset_values(source, total_tokens);
      offsets = source;
    } else {
      check_vector(source, "lengths");
      check_length_values(source, total_tokens);
      offsets = cu_seqlens(source);
    }
    check_padded_offsets(padded, offsets, total_tokens);
    if (spans.has_value()) check_spans(*spans, offsets);
    if (values_can_be_read(offsets)) {
      const auto on_host = [](const OptionalTensor& tensor) {
        return tensor.has_value() ? OptionalTensor(tensor->cpu()) : std::nullopt;
      };
      check_spans_and_rows(offsets.cpu(), on_host(padded), total_tokens, on_host(spans),
                           row_length);
    }
    rule.segments = segments_of(offsets, padded, total_tokens);
    rule.causal = causal;
    // A window at least as long as the row has no effect.
    rule.window = window.has_value() && *window < total_tokens ? *window : 0;
    if (spans.has_value()) {
      rule.spans = spans->const_data_ptr<int32_t>();
      rule.n_spans = spans->size(0);
    }
  }
};

// The rows of `row_length` tokens each that a flat row is divided into.
struct Rows {
  int64_t count;
  int64_t length;

  Rows(int64_t total_tokens, OptionalInt row_length)
      : count(1), length(row_length.value_or(total_tokens)) {
    if (!row_length.has_value()) return;
    TORCH_CHECK_VALUE(length >= 1 && total_tokens % length == 0,
                      "row_length must be at least 1 and divide total_tokens = ", total_tokens,
                      ", got ", length);
    count = total_tokens / length;
  }
};

// Return the product, or the largest int64 if it overflows.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) return std::numeric_limits<int64_t>::max();
  }
  return result;
}

Tensor mask_ranges_kernel(const Tensor& source, int64_t total_tokens, bool from_cu_seqlens,
                          bool causal, OptionalInt window, const OptionalTensor& spans,
                          const OptionalTensor& cu_seqlens_padded) {
  const MaskInputs inputs(source, total_tokens, from_cu_seqlens, causal, window, spans,
                          cu_seqlens_padded, std::nullopt);
  Tensor ranges = at::empty({2, total_tokens}, int32_on(source));
  if (total_tokens == 0) return ranges;
  MaskRangesArgs args;
  args.rule = inputs.rule;
  args.total_tokens = total_tokens;
  args.first = ranges.mutable_data_ptr<int32_t>();
  args.end = args.first + total_tokens;
  CUSEQ_RUN(mask_ranges, source, args);
  return ranges;
}

// The bits of an element for a visible key and for a hidden one.
struct MaskBits {
  uint64_t seen;
  uint64_t hidden;

  MaskBits(at::ScalarType dtype, bool finite) : seen(0), hidden(0) {
    using Float = std::numeric_limits<float>;
    using Double = std::numeric_limits<double>;
    switch (dtype) {
      case at::kBool:
        seen = 1;
        return;
      case at::kFloat:
        hidden = std::bit_cast<uint32_t>(finite ? Float::lowest() : -Float::infinity());
        return;
      case at::kDouble:
        hidden = std::bit_cast<uint64_t>(finite ? Double::lowest() : -Double::infinity());
        return;
      case at::kBFloat16:
        hidden = finite ? 0xff7f : 0xff80;
        return;
      case at::kHalf:
        hidden = finite ? 0xfbff : 0xfc00;
        return;
      default:
        TORCH_CHECK_TYPE(false, "dtype must be bool, float32, bfloat16, float16 or float64, got ",
                         dtype_name(dtype));
    }
  }
};

// Write args.rows masks of queries x keys into new memory.
Tensor fresh_mask(DenseMaskArgs args, const MaskBits& bits, const at::TensorOptions& options) {
  args.stride = round_up(args.keys, kLineAlignment);
  args.seen = bits.seen;
  args.hidden = bits.hidden;
  Tensor out = at::empty({args.rows, 1, args.queries, args.stride}, options);
  args.element_size = out.element_size();
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) CUSEQ_RUN(dense_mask, out, args);
  return out.narrow(-1, 0, args.keys);
}

Tensor dense_mask_kernel(const Tensor& source, int64_t total_tokens, bool from_cu_seqlens,
                         bool causal, OptionalInt window, const OptionalTensor& spans,
                         const OptionalTensor& cu_seqlens_padded, OptionalInt row_length,
                         std::optional<at::ScalarType> dtype, bool finite) {
  const at::ScalarType type = dtype.value_or(at::kBool);
  const MaskBits bits(type, finite);
  check_tokens(total_tokens);
  check_dense_mask(total_tokens, row_length, type);
  const Rows rows(total_tokens, row_length);
  const MaskInputs inputs(source, total_tokens, from_cu_seqlens, causal, window, spans,
                          cu_seqlens_padded, row_length);
  DenseMaskArgs args;
  args.rule = inputs.rule;
  args.rows = rows.count;
  args.queries = rows.length;
  args.keys = rows.length;
  args.row_step = rows.length;
  return fresh_mask(args, bits, source.options().dtype(type));
}

void check_range_values(const Tensor& ranges, const Rows& rows) {
  if (rows.count == 1 || !values_can_be_read(ranges)) return;
  const Tensor host = host_values(ranges);
  const auto* first = host.const_data_ptr<int64_t>();
  const int64_t* end = first + host.size(1);
  for (int64_t token = 0; token < host.size(1); ++token) {
    const int64_t begin = token / rows.length * rows.length;
    TORCH_CHECK_VALUE(begin <= first[token] && end[token] <= begin + rows.length,
                      "no sequence may cross the end of a row of row_length = ", rows.length,
                      ", but token ", token, " sees tokens [", first[token], ", ", end[token], ")");
  }
}

std::vector<Tensor> block_mask_kernel(const Tensor& ranges, OptionalInt row_length,
                                      int64_t query_block, int64_t key_block) {
  TORCH_CHECK_TYPE(ranges.scalar_type() == at::kInt, "ranges must be int32, got ",
                   dtype_name(ranges.scalar_type()));
  TORCH_CHECK_VALUE(ranges.dim() == 2 && ranges.size(0) == 2 && ranges.is_contiguous(),
                    "ranges must be contiguous [2, total_tokens], got shape ", ranges.sizes());
  check_block_mask(ranges.size(1), row_length, query_block, key_block);
  const Rows rows(ranges.size(1), row_length);
  check_range_values(ranges, rows);
  BlockMaskArgs args;
  args.first = ranges.const_data_ptr<int32_t>();
  args.end = args.first + ranges.size(1);
  args.rows = rows.count;
  args.row_length = rows.length;
  args.query_block = query_block;
  args.key_block = key_block;
  args.query_blocks = ceil_div(rows.length, query_block);
  args.key_blocks = ceil_div(rows.length, key_block);
  const auto options = int32_on(ranges);
  std::vector<Tensor> results;
  const auto lists = [&](int64_t blocks, int64_t others, int32_t*(&counts)[2],
                         int32_t*(&indices)[2]) {
    for (int kind = 0; kind < 2; ++kind) {
      results.push_back(at::empty({rows.count, 1, blocks}, options));
      counts[kind] = results.back().mutable_data_ptr<int32_t>();
      results.push_back(at::empty({rows.count, 1, blocks, others}, options));
      indices[kind] = results.back().mutable_data_ptr<int32_t>();
    }
  };
  lists(args.query_blocks, args.key_blocks, args.key_counts, args.key_indices);
  lists(args.key_blocks, args.query_blocks, args.query_counts, args.query_indices);
  if (ranges.size(1) == 0) return results;
  Tensor scratch;
  if (ranges.is_cuda()) {
    scratch = at::empty({rows.count, args.query_blocks, 4}, options);
    args.ranges = scratch.mutable_data_ptr<int32_t>();
  }
  CUSEQ_RUN(block_mask, ranges, args);
  return results;
}

}  // namespace

int64_t dense_mask_bytes(int64_t rows, int64_t row_length, at::ScalarType dtype) {
  return product({rows, row_length, round_up(row_length, kLineAlignment),
                  static_cast<int64_t>(c10::elementSize(dtype))});
}

int64_t block_mask_bytes(int64_t rows, int64_t row_length, int64_t query_block, int64_t key_block) {
  const int64_t queries = ceil_div(row_length, query_block);
  const int64_t keys = ceil_div(row_length, key_block);
  // Four lists of counts and of indices, plus the ranges.
  constexpr int64_t kSize = sizeof(int32_t);
  const int64_t indices = product({rows, queries, keys, 4, kSize});
  const int64_t rest = rows * 2 * (queries + keys + row_length) * kSize;
  return indices > std::numeric_limits<int64_t>::max() - rest ? indices : indices + rest;
}

void check_dense_mask(int64_t total_tokens, OptionalInt row_length, at::ScalarType dtype) {
  static const int64_t limit = limit_from_environment("CUSEQ_DENSE_MASK_MAX_BYTES");
  MaskBits(dtype, /*finite=*/false);  // raises for an unsupported dtype
  const Rows rows(total_tokens, row_length);
  const int64_t bytes = dense_mask_bytes(rows.count, rows.length, dtype);
  TORCH_CHECK_VALUE(bytes <= limit, "a dense mask of [", rows.count, ", 1, ", rows.length, ", ",
                    rows.length, "] ", dtype, " takes ", bytes,
                    " bytes, which must be at most CUSEQ_DENSE_MASK_MAX_BYTES = ", limit,
                    ": packed.block_mask() with flex_attention, or cuseq.varlen_attention, needs "
                    "no memory of tokens x tokens");
}

void check_block_mask(int64_t total_tokens, OptionalInt row_length, int64_t query_block,
                      int64_t key_block) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const auto& [size, name] : {std::pair{query_block, "query"}, std::pair{key_block, "key"}}) {
    TORCH_CHECK_VALUE(size >= 1 && size <= kMost, name, "_block must lie in [1, 2^31 - 1], got ",
                      size);
  }
  const Rows rows(total_tokens, row_length);
}

void check_spans(const Tensor& spans, const Tensor& offsets) {
  TORCH_CHECK_TYPE(spans.scalar_type() == at::kInt, "spans must be int32, got ",
                   dtype_name(spans.scalar_type()));
  TORCH_CHECK_VALUE(spans.dim() == 2 && spans.size(1) == 2 && spans.is_contiguous(),
                    "spans must be contiguous [n_spans, 2], got shape ", spans.sizes());
  TORCH_CHECK_VALUE(spans.device() == offsets.device(), "spans must lie where the lengths do, on ",
                    offsets.device(), ", got ", spans.device());
}

void check_spans_and_rows(const Tensor& cu_seqlens, const OptionalTensor& padded,
                          int64_t total_tokens, const OptionalTensor& spans,
                          OptionalInt row_length) {
  MaskRule rule;
  rule.segments = segments_of(cu_seqlens, padded, total_tokens);
  if (spans.has_value()) {
    const Tensor host = host_values(*spans);
    const auto* span = host.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < host.size(0); ++i, span += 2) {
      TORCH_CHECK_VALUE(0 <= span[0] && span[0] < span[1] && span[1] <= total_tokens,
                        "spans must be (start, end) with 0 <= start < end <= total_tokens = ",
                        total_tokens, ", got spans[", i, "] = (", span[0], ", ", span[1], ")");
      const bool is_repeated = i > 0 && span[-2] == span[0] && span[-1] == span[1];
      TORCH_CHECK_VALUE(i == 0 || is_repeated || span[-1] <= span[0],
                        "spans must be sorted and must not overlap, got spans[", i, "] = (",
                        span[0], ", ", span[1], ") after (", span[-2], ", ", span[-1], ")");
      const int64_t segment = rule.segments.seqlens.segment_of(span[0]);
      TORCH_CHECK_VALUE(
          segment < rule.segments.seqlens.n_seqs && span[1] <= rule.segments.real_end(segment),
          "spans must lie inside one sequence, got spans[", i, "] = (", span[0], ", ", span[1],
          ")");
    }
  }
  if (!row_length.has_value()) return;
  const Rows rows(total_tokens, row_length);
  for (int64_t i = 0; i < rule.segments.seqlens.n_seqs; ++i) {
    const int64_t begin = rule.segments.seqlens.begin(i);
    const int64_t end = rule.segments.real_end(i);
    TORCH_CHECK_VALUE(begin >= end || begin / rows.length == (end - 1) / rows.length,
                      "no sequence may cross the end of a row of row_length = ", rows.length,
                      ", got sequence ", i, " in tokens [", begin, ", ", end, ")");
  }
}

Tensor mask_of_tile(const MaskRule& rule, int64_t query_begin, int64_t queries, int64_t key_begin,
                    int64_t keys, const Tensor& like) {
  DenseMaskArgs args;
  args.rule = rule;
  args.queries = queries;
  args.keys = keys;
  args.query_begin = query_begin;
  args.key_begin = key_begin;
  return fresh_mask(args, MaskBits(like.scalar_type(), /*finite=*/false), like.options());
}

Tensor mask_ranges(const MaskOptions& o) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymInt, bool, bool, OptionalInt, const OptionalTensor&,
                     const OptionalTensor&)>("cuseq::mask_ranges");
  return op.call(o.source, o.total_tokens, o.from_cu_seqlens, o.causal, o.window, o.spans,
                 o.cu_seqlens_padded);
}

Tensor dense_mask(const MaskOptions& o, const OptionalSymInt& row_length,
                  std::optional<at::ScalarType> dtype, bool finite) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymInt, bool, bool, OptionalInt, const OptionalTensor&,
                     const OptionalTensor&, OptionalSymInt, std::optional<at::ScalarType>, bool)>(
          "cuseq::dense_mask");
  return op.call(o.source, o.total_tokens, o.from_cu_seqlens, o.causal, o.window, o.spans,
                 o.cu_seqlens_padded, row_length, dtype, finite);
}

std::vector<Tensor> block_mask(const Tensor& ranges, const OptionalSymInt& row_length,
                               int64_t query_block, int64_t key_block) {
  static const auto op =
      find_op<std::vector<Tensor>(const Tensor&, OptionalSymInt, int64_t, int64_t)>(
          "cuseq::block_mask");
  return op.call(ranges, row_length, query_block, key_block);
}

CUSEQ_REGISTER(m) {
  m.impl("mask_ranges", TORCH_FN(mask_ranges_kernel));
  m.impl("dense_mask", TORCH_FN(dense_mask_kernel));
  m.impl("block_mask", TORCH_FN(block_mask_kernel));
}

}  // namespace cuseq
