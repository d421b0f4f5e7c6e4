#include <ATen/ops/empty.h>

#include <limits>

#include "cuseq/ops.h"
#include "cuseq/seqlens.h"
#include "layout/host_meta.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "ops/scan_lengths.h"
#include "ops/types.h"

namespace cuseq {
namespace {

ScanLengthsArgs scan_of(const Tensor& lengths) {
  ScanLengthsArgs args;
  args.source = lengths.const_data_ptr();
  args.source_stride = lengths.stride(0);
  args.source_is_int64 = lengths.scalar_type() == at::kLong;
  args.n_seqs = lengths.size(0);
  args.max_seqs = lengths.size(0);
  args.limit = std::numeric_limits<int32_t>::max();
  return args;
}

void check_lengths(const Tensor& lengths) {
  check_vector(lengths, "lengths");
  check_length_values(lengths, /*total_tokens=*/-1);
}

Tensor cu_seqlens_kernel(const Tensor& lengths) {
  check_lengths(lengths);
  Tensor out = at::empty({lengths.size(0) + 1}, int32_on(lengths));
  ScanLengthsArgs args = scan_of(lengths);
  args.cu_seqlens = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(scan_lengths, lengths, args);
  return out;
}

Tensor max_seqlen_kernel(const Tensor& lengths) {
  check_lengths(lengths);
  Tensor out = at::empty({}, int32_on(lengths));
  ScanLengthsArgs args = scan_of(lengths);
  args.max_seqlen = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(scan_lengths, lengths, args);
  return out;
}

c10::SymInt max_seqlen_sync_kernel(const Tensor& lengths) {
  TORCH_CHECK(!is_capturing(lengths),
              "max_seqlen_sync reads lengths on the host, which a CUDA graph capture cannot do: "
              "pass the longest length as an int instead");
  return max_seqlen_kernel(lengths).item<int64_t>();
}

Tensor last_token_indices_kernel(const Tensor& lengths) {
  check_lengths(lengths);
  Tensor out = at::empty({lengths.size(0)}, int32_on(lengths));
  ScanLengthsArgs args = scan_of(lengths);
  args.last_token_indices = out.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(scan_lengths, lengths, args);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> layout_metadata_kernel(const Tensor& source,
                                                          int64_t total_tokens, int64_t max_seqs,
                                                          bool from_cu_seqlens,
                                                          const OptionalTensor& num_seqs) {
  check_tokens(total_tokens);
  check_source(source, total_tokens, from_cu_seqlens);
  const int64_t n_seqs = source.size(0) - (from_cu_seqlens ? 1 : 0);
  check_max_seqs(max_seqs);
  TORCH_CHECK_VALUE(num_seqs.has_value() || n_seqs <= max_seqs,
                    "there must be at most max_seqs = ", max_seqs, " sequences, got ", n_seqs,
                    ": pass a larger max_seqs");

  Tensor lengths = at::empty({n_seqs}, int32_on(source));
  Tensor offsets = at::empty({max_seqs + 1}, int32_on(source));
  Tensor host_meta = at::empty({kHostMetaSize}, int32_on(source));
  ScanLengthsArgs args = scan_of(source);
  args.source_is_offsets = from_cu_seqlens;
  args.n_seqs = n_seqs;
  if (num_seqs.has_value()) {
    TORCH_CHECK_VALUE(num_seqs->numel() == 1 && num_seqs->scalar_type() == at::kInt &&
                          num_seqs->device() == source.device(),
                      "num_seqs must be one int32 on the lengths' device, got shape ",
                      num_seqs->sizes(), ", ", dtype_name(num_seqs->scalar_type()), ", ",
                      num_seqs->device());
    if (values_can_be_read(*num_seqs)) {
      const auto count = num_seqs->item<int64_t>();
      TORCH_CHECK_VALUE(count <= n_seqs, "there must be at most max_seqs = ", n_seqs,
                        " sequences, got ", count, ": pass a larger max_seqs");
    }
    args.n_seqs_on_device = num_seqs->const_data_ptr<int32_t>();
  }
  args.max_seqs = max_seqs;
  args.limit = total_tokens;
  args.lengths = lengths.mutable_data_ptr<int32_t>();
  args.cu_seqlens = offsets.mutable_data_ptr<int32_t>();
  args.host_meta = host_meta.mutable_data_ptr<int32_t>();
  CUSEQ_RUN(scan_lengths, source, args);
  return {lengths, offsets, host_meta};
}

// Check that the segments fit in the row, if the lengths can be read on the host. Otherwise the
// status in host_meta reports it.
void check_segments(const Tensor& lengths, int64_t total_tokens, int64_t multiple) {
  if (!values_can_be_read(lengths)) return;
  const Tensor host = host_values(lengths);
  int64_t end = 0;
  for (int64_t i = 0; i < host.numel(); ++i) {
    end += segment_length(host.const_data_ptr<int64_t>()[i], multiple);
    TORCH_CHECK_VALUE(end <= total_tokens, "lengths rounded up to segment_multiple = ", multiple,
                      " must sum to at most total_tokens = ", total_tokens, ", but segment ", i,
                      " ends at ", end);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> segment_metadata_kernel(
    const Tensor& lengths, int64_t total_tokens, int64_t max_seqs, int64_t segment_multiple) {
  check_tokens(total_tokens);
  check_source(lengths, total_tokens, /*is_cu_seqlens=*/false);
  constexpr int64_t kLargestMultiple = 1 << 20;  // keeps sums of segments within 64 bits
  TORCH_CHECK_VALUE(segment_multiple >= 1 && segment_multiple <= kLargestMultiple,
                    "segment_multiple must lie in [1, 2^20], got ", segment_multiple);
  check_max_seqs(max_seqs);
  TORCH_CHECK_VALUE(lengths.size(0) <= max_seqs, "there must be at most max_seqs = ", max_seqs,
                    " sequences, got ", lengths.size(0), ": pass a larger max_seqs");
  check_segments(lengths, total_tokens, segment_multiple);
  const auto options = int32_on(lengths);
  const auto outputs_of = [&](ScanLengthsArgs& args) {
    const Tensor own = at::empty({lengths.size(0)}, options);
    const Tensor offsets = at::empty({max_seqs + 1}, options);
    const Tensor host_meta = at::empty({kHostMetaSize}, options);
    args = scan_of(lengths);
    args.max_seqs = max_seqs;
    args.limit = total_tokens;
    args.lengths = own.mutable_data_ptr<int32_t>();
    args.cu_seqlens = offsets.mutable_data_ptr<int32_t>();
    args.host_meta = host_meta.mutable_data_ptr<int32_t>();
    return std::tuple{own, offsets, host_meta};
  };
  ScanSegmentsArgs args;
  const auto real = outputs_of(args.lengths);
  const auto padded = outputs_of(args.segments);
  args.segments.segment_multiple = segment_multiple;
  args.lengths.fit_multiple = segment_multiple;  // one status covers both
  CUSEQ_RUN(scan_segments, lengths, args);
  return std::tuple_cat(real, padded);
}

}  // namespace

Tensor cu_seqlens(const Tensor& lengths) {
  static const auto op = find_op<Tensor(const Tensor&)>("cuseq::cu_seqlens");
  return op.call(lengths);
}

Tensor max_seqlen(const Tensor& lengths) {
  static const auto op = find_op<Tensor(const Tensor&)>("cuseq::max_seqlen");
  return op.call(lengths);
}

Tensor last_token_indices(const Tensor& lengths) {
  static const auto op = find_op<Tensor(const Tensor&)>("cuseq::last_token_indices");
  return op.call(lengths);
}

CUSEQ_REGISTER(m) {
  m.impl("cu_seqlens", TORCH_FN(cu_seqlens_kernel));
  m.impl("max_seqlen", TORCH_FN(max_seqlen_kernel));
  m.impl("max_seqlen_sync", TORCH_FN(max_seqlen_sync_kernel));
  m.impl("last_token_indices", TORCH_FN(last_token_indices_kernel));
  m.impl("layout_metadata", TORCH_FN(layout_metadata_kernel));
  m.impl("segment_metadata", TORCH_FN(segment_metadata_kernel));
}

}  // namespace cuseq
