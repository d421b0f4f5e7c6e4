#include "attention/rows.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/head_and_tail.h"
#include "ops/token_metadata.h"

namespace cuseq::attention {
namespace {

// Return the rows of a tensor, each in as few parts as it and `other` allow, if there is one.
RowBytes bytes_of(const Tensor& rows, const Tensor* other = nullptr) {
  const auto element = static_cast<int64_t>(rows.element_size());
  const int64_t width = rows.dim() == 3 ? rows.size(2) : 1;
  TORCH_INTERNAL_ASSERT(width == 1 || rows.stride(2) == 1, "a head's values are not consecutive");
  RowBytes found;
  found.data = static_cast<char*>(rows.mutable_data_ptr());
  found.parts = rows.size(1);
  found.part_stride = rows.stride(1) * element;
  found.row_stride = rows.stride(0) * element;
  found.bytes = width * element;
  const auto has_whole_rows = [&](const Tensor& one) { return one.stride(1) == width; };
  if (has_whole_rows(rows) && (other == nullptr || has_whole_rows(*other))) {
    found.bytes *= found.parts;
    found.parts = 1;
  }
  constexpr int64_t kMostBytes = 16;
  const int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(found.data)) |
                      found.part_stride | found.row_stride | found.bytes | kMostBytes;
  found.unit = all & -all;  // the largest power of two that divides each of them
  return found;
}

}  // namespace

bool is_expanded(const Tensor& rows) {
  return (rows.stride(0) == 0 && rows.size(0) > 1) || (rows.stride(1) == 0 && rows.size(1) > 1);
}

Tensor aligned_rows(const Tensor& rows) {
  constexpr int64_t kBytes = 16;
  const auto is_aligned = [&](int64_t elements) {
    return elements * static_cast<int64_t>(rows.element_size()) % kBytes == 0;
  };
  const auto address = reinterpret_cast<uintptr_t>(rows.const_data_ptr());
  const bool aligned =
      address % kBytes == 0 && is_aligned(rows.stride(0)) && is_aligned(rows.stride(1));
  return aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

Tensor pad_last_dim(const Tensor& tensor, int64_t size) {
  const int64_t missing = size - tensor.size(-1);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing});
}

Tensor unpad_last_dim(const Tensor& tensor, int64_t size) {
  return (tensor.size(-1) == size ? tensor : tensor.narrow(-1, 0, size)).contiguous();
}

void zero_tail(at::TensorList rows, const Sequences& sequences) {
  const int64_t total_tokens = rows.front().size(0);
  if (sequences.num_real_tokens.has_value()) {
    const int64_t tail = total_tokens - *sequences.num_real_tokens;
    if (tail == 0) return;
    for (const Tensor& tensor : rows) tensor.narrow(0, *sequences.num_real_tokens, tail).zero_();
    return;
  }
  TORCH_INTERNAL_ASSERT(rows.size() <= ZeroTailArgs::kMostTensors, "too many tensors");
  ZeroTailArgs args;
  for (const Tensor& tensor : rows) {
    // A replaced flash kernel may return what it likes, and the kernel below checks nothing.
    TORCH_INTERNAL_ASSERT(
        tensor.size(0) == total_tokens && tensor.device() == sequences.offsets.device(),
        "a tensor does not have the row's tokens");
    args.tensors[args.num_tensors++] = bytes_of(tensor);
  }
  args.first = sequences.offsets.const_data_ptr<int32_t>() + sequences.count();
  args.num_rows = total_tokens;
  CUSEQ_RUN(zero_tail, sequences.offsets, args);
}

void copy_head(at::TensorList to, at::TensorList from, const Sequences& sequences) {
  TORCH_INTERNAL_ASSERT(to.size() == from.size() && to.size() <= CopyHeadArgs::kMostTensors,
                        "not as many tensors to copy from as to");
  CopyHeadArgs args;
  args.num_rows = to.front().size(0);
  for (size_t i = 0; i < to.size(); ++i) {
    TORCH_INTERNAL_ASSERT(
        to[i].sizes() == from[i].sizes() && to[i].scalar_type() == from[i].scalar_type() &&
            to[i].size(0) == args.num_rows && to[i].device() == sequences.offsets.device() &&
            from[i].device() == sequences.offsets.device(),
        "the tensors of a pair are not alike");
    RowBytes& target = args.to[args.num_tensors];
    RowBytes& source = args.from[args.num_tensors++];
    target = bytes_of(to[i], &from[i]);
    source = bytes_of(from[i], &to[i]);
    target.unit = source.unit = std::min(target.unit, source.unit);
  }
  args.end = sequences.offsets.const_data_ptr<int32_t>() + sequences.count();
  CUSEQ_RUN(copy_head, sequences.offsets, args);
}

Gradients with_zero_tails(const Call& call, Gradients gradients) {
  const auto& [grad_q, grad_k, grad_v] = gradients;
  if (call.is_of_one_row()) {
    zero_tail({grad_q, grad_k, grad_v}, call.queries);
  } else {
    zero_tail({grad_q}, call.queries);
    zero_tail({grad_k, grad_v}, call.keys);
  }
  return gradients;
}

std::pair<Tensor, Tensor> positions_and_seq_ids(const Tensor& offsets, int64_t total_tokens) {
  Tensor positions = at::empty({total_tokens}, offsets.options());
  Tensor sequences = at::empty({total_tokens}, offsets.options());
  TokenMetadataArgs args;
  args.segments = segments_of(offsets, std::nullopt, total_tokens);
  args.position_ids = positions.mutable_data_ptr<int32_t>();
  args.seq_ids = sequences.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(token_metadata, offsets, args);
  return {positions, sequences};
}

Tensor queries_without_keys(const Call& call) {
  const auto [_, sequences] = positions_and_seq_ids(call.queries.offsets, call.q.size(0));
  // The tail belongs to no sequence, and counts as without keys.
  const Tensor lengths = at::constant_pad_nd(call.keys.offsets.diff(), {0, 1});
  return lengths.index_select(0, sequences).eq(0);
}

}  // namespace cuseq::attention
