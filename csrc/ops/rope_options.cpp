#include "ops/rope_options.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <array>
#include <limits>

#include "layout/host_meta.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "ops/types.h"

namespace cuseq {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxHeads = 65536;  // fits in a CUDA grid however the heads are divided

enum Layout : int64_t { kThd, kBshd, kBhsd };
constexpr std::array<std::string_view, 3> kFormats = {"thd", "bshd", "bhsd"};
constexpr std::array<std::string_view, 2> kTables = {"position", "token"};

template <size_t N>
int64_t choice(std::string_view value, const std::array<std::string_view, N>& choices,
               const char* name) {
  const auto found = std::find(choices.begin(), choices.end(), value);
  TORCH_CHECK_VALUE(found != choices.end(), name, " must be one of ", c10::Join(", ", choices),
                    ", got ", value);
  return found - choices.begin();
}

void check_tensor(const Tensor& tensor, const char* name, const Tensor& query, int64_t format) {
  const int64_t dims = format == kThd ? 3 : 4;
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, " must have ",
                    format == kThd ? "shape [tokens, heads, head_dim] for qkv_format thd"
                    : format == kBshd
                        ? "shape [batch, seqlen, heads, head_dim] for qkv_format bshd"
                        : "shape [batch, heads, seqlen, head_dim] for qkv_format bhsd",
                    ", got ", tensor.sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), name, " must be of q's dtype, ",
                   dtype_name(query.scalar_type()), ", got ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == query.device(), name, " must lie on q's device, ",
                    query.device(), ", got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.size(-1) == query.size(-1), name, " must have q's head_dim, ",
                    query.size(-1), ", got ", tensor.size(-1));
  TORCH_CHECK_VALUE(tensor.stride(-1) == 1 || tensor.numel() == 0 || tensor.size(-1) == 1, name,
                    " must be contiguous in its last dimension, got strides ", tensor.strides());
}

// Reject heads that partly overlap: the order of writes to them would be undefined.
void check_heads_apart(const Tensor& tensor, const char* name) {
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    TORCH_CHECK_VALUE(
        tensor.size(dim) <= 1 || tensor.stride(dim) == 0 || tensor.stride(dim) >= tensor.size(-1),
        name, " must not overlap itself except through expand(), got sizes ", tensor.sizes(),
        " and strides ", tensor.strides());
  }
}

struct Sizes {
  int64_t batch;
  int64_t tokens;
  int64_t heads;
};

Sizes sizes_of(const Tensor& tensor, int64_t format) {
  switch (format) {
    case kThd:
      return {1, tensor.size(0), tensor.size(1)};
    case kBshd:
      return {tensor.size(0), tensor.size(1), tensor.size(2)};
    default:
      return {tensor.size(0), tensor.size(2), tensor.size(1)};
  }
}

int64_t rotary_dim_of(const RopeOptions& options, int64_t head_dim) {
  const int64_t width = options.cos.size(-1);
  if (!options.rotary_dim.has_value()) {
    const int64_t rotary = 2 * width <= head_dim ? 2 * width : width;
    TORCH_CHECK_VALUE(rotary <= head_dim && rotary % 2 == 0 && rotary > 0,
                      "cos must be rotary_dim / 2 or rotary_dim wide, with an even rotary_dim of "
                      "at most head_dim = ",
                      head_dim, ", got width ", width);
    return rotary;
  }
  const int64_t rotary = *options.rotary_dim;
  TORCH_CHECK_VALUE(rotary > 0 && rotary % 2 == 0 && rotary <= head_dim,
                    "rotary_dim must be even, positive and at most head_dim = ", head_dim, ", got ",
                    rotary);
  TORCH_CHECK_VALUE(width == rotary || 2 * width == rotary,
                    "cos must be rotary_dim / 2 = ", rotary / 2, " or rotary_dim = ", rotary,
                    " wide, got width ", width);
  return rotary;
}

// Check on the host that the table repeats angles as its width implies. The last row has the
// largest angles, so a misread width shows there.
void check_width(const RopeOptions& options, int64_t rotary_dim) {
  const Tensor& sin = options.sin;
  if (!values_can_be_read(sin) || sin.numel() == 0) return;
  const int64_t width = sin.size(-1);
  const Tensor last_rows = sin.select(-2, sin.size(-2) - 1);
  const auto same_halves = [&](const Tensor& row) {
    return at::equal(row.narrow(-1, 0, width / 2), row.narrow(-1, width / 2, width / 2));
  };
  const auto same_neighbours = [&](const Tensor& row) {
    const Tensor pairs = row.unflatten(-1, {width / 2, 2});
    return at::equal(pairs.select(-1, 0), pairs.select(-1, 1));
  };
  if (width == rotary_dim) {
    const bool repeats = options.interleaved ? same_neighbours(last_rows) : same_halves(last_rows);
    TORCH_CHECK_VALUE(
        repeats, "cos and sin as wide as rotary_dim = ", rotary_dim, " must repeat each angle ",
        options.interleaved ? "side by side ([a, a, b, b]) with interleaved=True"
                            : "in their second half ([a, b, a, b]) with interleaved=False",
        ", got another last row of sin: give tables of width rotary_dim / 2, or another "
        "rotary_dim");
  } else if (width % 2 == 0 && width > 0 && last_rows.ne(0).any().item<bool>()) {
    TORCH_CHECK_VALUE(
        options.rotary_dim.has_value() || !(same_halves(last_rows) || same_neighbours(last_rows)),
        "rotary_dim must be given where a table narrower than head_dim repeats its angles: sin of "
        "width ",
        width, " was taken as half of rotary_dim = ", rotary_dim, ", but its last row repeats");
  }
}

// Read the strides of plane, batch and token of a tensor with an entry per token, [3, batch,
// tokens, ...] with `trailing` more dimensions. The planes are absent unless `planes`. The batch
// may be 1 or absent if all batch rows share the entries. Return false if the tensor has another
// shape.
bool read_per_token(const Tensor& tensor, int64_t trailing, bool planes, const Sizes& sizes,
                    int64_t (&strides)[3]) {
  const int64_t batch = planes ? 1 : 0;
  const int64_t token = tensor.dim() - 1 - trailing;
  const bool shared = token == batch || (token == batch + 1 && tensor.size(batch) == 1);
  if ((!shared && (token != batch + 1 || tensor.size(batch) != sizes.batch)) ||
      tensor.size(token) != sizes.tokens || (planes && tensor.size(0) != 3)) {
    return false;
  }
  strides[0] = planes ? tensor.stride(0) : 0;
  strides[1] = shared ? 0 : tensor.stride(batch);
  strides[2] = tensor.stride(token);
  return true;
}

void read_table(const RopeOptions& options, bool per_token, const Sizes& sizes, const Tensor& query,
                RopeArgs& args) {
  const Tensor& cos = options.cos;
  const Tensor& sin = options.sin;
  TORCH_CHECK_VALUE(cos.sizes() == sin.sizes(), "cos and sin must have the same shape, got ",
                    cos.sizes(), " and ", sin.sizes());
  TORCH_CHECK_TYPE(cos.scalar_type() == sin.scalar_type(),
                   "cos and sin must have the same dtype, got ", dtype_name(cos.scalar_type()),
                   " and ", dtype_name(sin.scalar_type()));
  RopeTable& table = args.table;
  table.dtype = float_type(cos, "cos");
  for (const auto& [tensor, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
    TORCH_CHECK_VALUE(tensor->device() == query.device(), name, " must lie on q's device, ",
                      query.device(), ", got ", tensor->device());
    TORCH_CHECK_VALUE(tensor->dim() >= 2, name, " must have at least two dimensions, got shape ",
                      tensor->sizes());
    TORCH_CHECK_VALUE(tensor->stride(-1) == 1 || tensor->size(-1) == 1 || tensor->numel() == 0,
                      name, " must be contiguous in its last dimension, got strides ",
                      tensor->strides());
  }
  args.rotary_dim = rotary_dim_of(options, args.head_dim);
  check_width(options, args.rotary_dim);
  table.column_step = options.interleaved && cos.size(-1) == args.rotary_dim ? 2 : 1;
  table.cos = cos.const_data_ptr();
  table.sin = sin.const_data_ptr();
  if (!per_token) {
    TORCH_CHECK_VALUE(cos.dim() == 2,
                      "cos must have shape [rows, width] with table=\"position\", got ",
                      cos.sizes());
    TORCH_CHECK_VALUE(cos.size(0) > 0 || sizes.batch * sizes.tokens == 0,
                      "cos must have a row for position 0, got ", cos.sizes());
    table.rows = cos.size(0);
    table.cos_strides[2] = cos.stride(0);
    table.sin_strides[2] = sin.stride(0);
    return;
  }
  const bool planes = options.mrope_section.has_value();
  const bool fits = read_per_token(cos, /*trailing=*/1, planes, sizes, table.cos_strides) &&
                    read_per_token(sin, /*trailing=*/1, planes, sizes, table.sin_strides);
  TORCH_CHECK_VALUE(fits, "cos must have a row for each token with table=\"token\", shape ",
                    planes ? "[3, batch, tokens, width]" : "[batch, tokens, width]",
                    " with batch = ", sizes.batch,
                    " (or 1, or left out) and tokens = ", sizes.tokens, ", got ", cos.sizes());
}

void read_planes(const RopeOptions& options, RopeArgs& args) {
  TORCH_CHECK_VALUE(options.mrope_section.has_value() || !options.mrope_interleaved,
                    "mrope_interleaved must be passed with mrope_section, got no mrope_section");
  if (!options.mrope_section.has_value()) return;
  const at::IntArrayRef section = *options.mrope_section;
  const int64_t pairs = args.rotary_dim / 2;
  TORCH_CHECK_VALUE(
      section.size() == 3 && std::ranges::all_of(section, [](int64_t n) { return n >= 0; }) &&
          section[0] + section[1] + section[2] == pairs,
      "mrope_section must be three counts of pairs that sum to rotary_dim / 2 = ", pairs, ", got ",
      section);
  RopePlanes& planes = args.planes;
  planes.kind = options.mrope_interleaved ? Planes::kInterleaved : Planes::kBlocked;
  int64_t end = 0;
  for (int i = 0; i < 3; ++i) {
    end += section[i];
    planes.ends[i] = options.mrope_interleaved ? 3 * section[i] : end;
  }
}

void check_reach(int64_t positions, const RopeArgs& args, const char* of) {
  TORCH_CHECK_VALUE(positions <= args.table.rows, "cos and sin must have a row for each position, ",
                    positions, " for ", of, ", got ", args.table.rows, " rows");
}

void check_divisible(int64_t tokens, int64_t divisor, const char* what) {
  TORCH_CHECK_VALUE(tokens % divisor == 0, what, " must be multiples of 2 * cp_size = ", divisor,
                    ", got ", tokens);
}

void read_segments(const RopeOptions& options, const Tensor& query, const Sizes& sizes,
                   RopeArgs& args) {
  const Tensor& offsets = *options.cu_seqlens;
  RopePositions& positions = args.positions;
  check_offsets(offsets);
  TORCH_CHECK_VALUE(offsets.device() == query.device(), "packed must lie on q's device, ",
                    query.device(), ", got ", offsets.device(), ": move it with packed.to(device)");
  const int64_t total_tokens = positions.global_tokens;
  positions.source = PositionSource::kSegments;
  positions.seqlens = {offsets.const_data_ptr<int32_t>(), offsets.size(0) - 1};
  const int64_t divisor = 2 * positions.cp_size;
  std::optional<HostMeta> meta;
  if (options.host_meta.has_value() && !is_capturing(query)) {
    meta = HostMeta::of(*options.host_meta);
    TORCH_CHECK_VALUE(meta->total_tokens == total_tokens,
                      "q must have packed.total_tokens = ", meta->total_tokens,
                      positions.cp_size == 1 ? "" : " / cp_size", " tokens, got ",
                      sizes.batch * sizes.tokens);
    meta->check_offsets(offsets);
  }
  check_offset_values(offsets, total_tokens);
  if (meta.has_value()) {
    positions.seqlens.n_seqs = meta->num_seqs;
    check_reach(meta->max_seqlen, args, "the longest sequence");
    check_reach(total_tokens - meta->num_real_tokens, args, "the tail");
    if (positions.cp_size > 1) check_divisible(meta->length_divisor, divisor, "lengths");
  } else if (values_can_be_read(offsets)) {
    const Tensor host = host_values(offsets);
    const int64_t* values = host.const_data_ptr<int64_t>();
    for (int64_t i = 0; i + 1 < host.numel(); ++i) {
      check_reach(values[i + 1] - values[i], args, "the longest sequence");
      if (positions.cp_size > 1) check_divisible(values[i + 1] - values[i], divisor, "lengths");
    }
    check_reach(total_tokens - values[host.numel() - 1], args, "the tail");
  }
}

void read_ids(const RopeOptions& options, const Tensor& query, const Sizes& sizes, RopeArgs& args) {
  const Tensor& ids = *options.position_ids;
  RopePositions& positions = args.positions;
  check_integer(ids, "position_ids");
  TORCH_CHECK_VALUE(ids.device() == query.device(), "position_ids must lie on q's device, ",
                    query.device(), ", got ", ids.device());
  const bool planes = args.planes.kind != Planes::kOne;
  TORCH_CHECK_VALUE(read_per_token(ids, /*trailing=*/0, planes, sizes, positions.id_strides),
                    "position_ids must have shape ",
                    planes ? "[3, batch, tokens]" : "[batch, tokens]",
                    " with batch = ", sizes.batch,
                    " (or 1, or left out) and tokens = ", sizes.tokens, ", got ", ids.sizes());
  positions.source = PositionSource::kIds;
  positions.ids = ids.const_data_ptr();
  positions.ids_are_int64 = ids.scalar_type() == at::kLong;
  if (!values_can_be_read(ids) || ids.numel() == 0) return;
  const auto [least, most] = at::aminmax(ids);
  TORCH_CHECK_VALUE(least.item<int64_t>() >= 0, "position_ids must not be negative, got ",
                    least.item<int64_t>());
  TORCH_CHECK_VALUE(most.item<int64_t>() < args.table.rows,
                    "position_ids must be below the table's number of rows, ", args.table.rows,
                    ", got ", most.item<int64_t>());
}

void read_positions(const RopeOptions& options, bool per_token, const Tensor& query,
                    const Sizes& sizes, RopeArgs& args) {
  RopePositions& positions = args.positions;
  const int64_t cp_size = options.cp_size;
  TORCH_CHECK_VALUE(cp_size >= 1, "cp_size must be at least 1, got ", cp_size);
  TORCH_CHECK_VALUE(options.cp_rank >= 0 && options.cp_rank < cp_size,
                    "cp_rank must lie in [0, cp_size = ", cp_size, "), got ", options.cp_rank);
  positions.cp_size = cp_size;
  positions.cp_rank = options.cp_rank;
  TORCH_CHECK_VALUE(cp_size <= std::numeric_limits<int32_t>::max() /
                                   std::max<int64_t>(1, sizes.batch * sizes.tokens),
                    "cp_size times the tokens of q must be at most 2^31 - 1, got ", cp_size,
                    " times ", sizes.batch * sizes.tokens);
  const int64_t offset = options.offset.guard_int(__FILE__, __LINE__);
  const bool has_offsets = options.cu_seqlens.has_value();
  const bool has_ids = options.position_ids.has_value();
  TORCH_CHECK_VALUE(!options.host_meta.has_value() || has_offsets,
                    "host_meta must be passed with cu_seqlens, got host_meta alone");
  TORCH_CHECK_VALUE(!(has_offsets && has_ids),
                    "positions must have one source, got packed and position_ids");
  TORCH_CHECK_VALUE(!per_token || !(has_offsets || has_ids),
                    "table=\"token\" must be used without packed and position_ids, since its rows "
                    "are the positions of the tokens, got ",
                    has_offsets ? "packed" : "position_ids");
  const bool dense = !(has_offsets || has_ids || per_token);
  TORCH_CHECK_VALUE(offset >= 0 && offset <= std::numeric_limits<int32_t>::max(),
                    "offset must lie in [0, 2^31 - 1], got ", offset);
  TORCH_CHECK_VALUE(
      offset == 0 || dense,
      "offset must be 0 if packed, position_ids or the table determine the positions, "
      "got ",
      offset);
  TORCH_CHECK_VALUE(cp_size == 1 || dense || has_offsets,
                    "cp_size must be 1 if position_ids or the table determine the positions, got ",
                    cp_size);
  TORCH_CHECK_VALUE(
      args.planes.kind == Planes::kOne || has_ids || per_token,
      "mrope_section must be passed with position_ids of three planes or table=\"token\", "
      "got neither");
  if (per_token) {
    positions.source = PositionSource::kToken;
  } else if (has_offsets) {
    positions.global_tokens = sizes.batch * sizes.tokens * cp_size;
    if (cp_size > 1) {
      check_divisible(positions.global_tokens, 2 * cp_size, "total_tokens");
    }
    read_segments(options, query, sizes, args);
  } else if (has_ids) {
    read_ids(options, query, sizes, args);
  } else {
    positions.first = offset;
    positions.global_tokens = sizes.tokens * cp_size;
    if (cp_size > 1) check_divisible(positions.global_tokens, 2 * cp_size, "tokens of a row");
    check_reach(sizes.tokens == 0 ? 0 : offset + positions.global_tokens, args, "the last token");
  }
}

}  // namespace

void read_strides(const Tensor& tensor, std::string_view qkv_format, int64_t (&strides)[3]) {
  const bool has_batch = qkv_format != kFormats[kThd];
  const bool heads_first = qkv_format == kFormats[kBhsd];
  strides[0] = has_batch ? tensor.stride(0) : 0;
  strides[1] = tensor.stride(heads_first ? 2 : has_batch ? 1 : 0);
  strides[2] = tensor.stride(heads_first || !has_batch ? 1 : 2);
}

void write_to(const Tensor& output, const RopeOptions& options, RopeTensor& tensor) {
  tensor.out = output.mutable_data_ptr();
  read_strides(output, options.qkv_format, tensor.out_strides);
}

RopeArgs plan_rope(TensorList tensors, const RopeOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 || tensors.size() == 2,
                    "tensors must be the query, or the query and the key, got ", tensors.size());
  const int64_t format = choice(options.qkv_format, kFormats, "qkv_format");
  const bool per_token = choice(options.table, kTables, "table") == 1;
  const Tensor& query = tensors[0];
  RopeArgs args;
  args.dtype = float_type(query, "q");
  check_tensor(query, "q", query, format);
  const Sizes sizes = sizes_of(query, format);
  args.batch = sizes.batch;
  args.tokens = sizes.tokens;
  args.head_dim = query.size(-1);
  TORCH_CHECK_VALUE(args.head_dim >= 2 && args.head_dim <= kMaxHeadDim, "head_dim must lie in [2, ",
                    kMaxHeadDim, "], got ", args.head_dim);
  check_tokens(sizes.batch * sizes.tokens);
  args.n_tensors = static_cast<int>(tensors.size());
  for (int i = 0; i < args.n_tensors; ++i) {
    if (i == 1) check_tensor(tensors[1], "k", query, format);
    const Sizes own = sizes_of(tensors[i], format);
    TORCH_CHECK_VALUE(own.batch == sizes.batch && own.tokens == sizes.tokens,
                      "k must have q's tokens, [", sizes.batch, ", ", sizes.tokens, "], got [",
                      own.batch, ", ", own.tokens, "]");
    TORCH_CHECK_VALUE(own.heads <= kMaxHeads, i == 0 ? "q" : "k", " must have at most ", kMaxHeads,
                      " heads, got ", own.heads);
    check_heads_apart(tensors[i], i == 0 ? "q" : "k");
    args.tensors[i].heads = own.heads;
    args.tensors[i].in = tensors[i].const_data_ptr();
    read_strides(tensors[i], options.qkv_format, args.tensors[i].in_strides);
  }
  args.interleaved = options.interleaved;
  args.inverse = options.inverse;
  read_table(options, per_token, sizes, query, args);
  read_planes(options, args);
  read_positions(options, per_token, query, sizes, args);
  return args;
}

namespace {

enum SavedNumber : size_t {
  kTable,
  kQkvFormat,
  kInterleaved,
  kHasRotaryDim,
  kRotaryDim,
  kMropeInterleaved,
  kCpSize,
  kCpRank,
  kInverse,
  kSections,  // the sections take the remaining entries
};

}  // namespace

void SavedRopeOptions::save(torch::autograd::AutogradContext* ctx, const RopeOptions& options,
                            torch::autograd::variable_list saved) {
  saved.insert(saved.end(), {options.cos, options.sin, or_undefined(options.cu_seqlens),
                             or_undefined(options.host_meta), or_undefined(options.position_ids)});
  ctx->save_for_backward(std::move(saved));
  std::vector<int64_t> numbers = {choice(options.table, kTables, "table"),
                                  choice(options.qkv_format, kFormats, "qkv_format"),
                                  options.interleaved,
                                  options.rotary_dim.has_value(),
                                  options.rotary_dim.value_or(0),
                                  options.mrope_interleaved,
                                  options.cp_size,
                                  options.cp_rank,
                                  options.inverse};
  if (options.mrope_section.has_value()) {
    numbers.insert(numbers.end(), options.mrope_section->begin(), options.mrope_section->end());
  }
  ctx->saved_data["numbers"] = std::move(numbers);
  ctx->saved_data["offset"] = options.offset;
}

SavedRopeOptions::SavedRopeOptions(torch::autograd::AutogradContext* ctx,
                                   const torch::autograd::variable_list& saved, size_t first)
    : numbers_(ctx->saved_data["numbers"].toIntVector()) {
  options.cos = saved[first];
  options.sin = saved[first + 1];
  options.cu_seqlens = or_nullopt(saved[first + 2]);
  options.host_meta = or_nullopt(saved[first + 3]);
  options.position_ids = or_nullopt(saved[first + 4]);
  options.offset = ctx->saved_data["offset"].toSymInt();
  options.table = kTables[numbers_[kTable]];
  options.qkv_format = kFormats[numbers_[kQkvFormat]];
  options.interleaved = numbers_[kInterleaved] != 0;
  if (numbers_[kHasRotaryDim] != 0) options.rotary_dim = numbers_[kRotaryDim];
  options.mrope_interleaved = numbers_[kMropeInterleaved] != 0;
  options.cp_size = numbers_[kCpSize];
  options.cp_rank = numbers_[kCpRank];
  options.inverse = numbers_[kInverse] != 0;
  if (numbers_.size() > kSections) {
    options.mrope_section = at::IntArrayRef(numbers_).slice(kSections);
  }
}

}  // namespace cuseq
