#include "layout/chunks.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "cuseq/seqlens.h"
#include "ops/checks.h"
#include "ops/dtype_name.h"
#include "ops/types.h"

namespace cuseq {
namespace {

void check_host_ints(const Tensor& tensor, const char* name) {
  check_vector(tensor, name);
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == at::kInt && tensor.is_contiguous(),
                    name, " must be contiguous int32 on the CPU, got ",
                    dtype_name(tensor.scalar_type()), " on ", tensor.device());
}

Tensor empty_ints(at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kInt).device(at::kCPU));
}

}  // namespace

Tensor recurrent_offsets(const Tensor& lengths, const OptionalTensor& segment_lengths,
                         int64_t total_tokens) {
  check_host_ints(lengths, "lengths");
  check_tokens(total_tokens);
  check_length_values(lengths, total_tokens);
  const auto* real = lengths.const_data_ptr<int32_t>();
  const int32_t* whole = real;
  if (segment_lengths.has_value()) {
    check_host_ints(*segment_lengths, "segment_lengths");
    TORCH_CHECK_VALUE(segment_lengths->size(0) == lengths.size(0),
                      "segment_lengths must have as many entries as lengths, ", lengths.size(0),
                      ", got ", segment_lengths->size(0));
    check_length_values(*segment_lengths, total_tokens);
    whole = segment_lengths->const_data_ptr<int32_t>();
  }
  std::vector<int32_t> offsets = {0};
  const auto end_at = [&](int64_t token) {
    if (token > offsets.back()) offsets.push_back(static_cast<int32_t>(token));
  };
  int64_t begin = 0;
  for (int64_t i = 0; i < lengths.size(0); ++i) {
    end_at(begin + std::min(real[i], whole[i]));
    begin += whole[i];
    end_at(begin);
  }
  end_at(total_tokens);
  Tensor result = empty_ints({static_cast<int64_t>(offsets.size())});
  std::ranges::copy(offsets, result.mutable_data_ptr<int32_t>());
  return result;
}

std::tuple<Tensor, Tensor> chunks_of(const Tensor& offsets, int64_t chunk_size) {
  check_host_ints(offsets, "offsets");
  TORCH_CHECK_VALUE(chunk_size >= 1, "chunk_size must be at least 1, got ", chunk_size);
  TORCH_CHECK_VALUE(offsets.size(0) >= 1, "offsets must have shape [n_runs + 1], got ",
                    offsets.sizes());
  check_offset_values(offsets, /*total_tokens=*/-1);
  const auto* begin = offsets.const_data_ptr<int32_t>();
  const int64_t runs = offsets.size(0) - 1;
  Tensor first = empty_ints({runs + 1});
  auto* first_chunk = first.mutable_data_ptr<int32_t>();
  first_chunk[0] = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t length = int64_t{begin[run + 1]} - begin[run];
    first_chunk[run + 1] =
        first_chunk[run] + static_cast<int32_t>(ceil_div(length, std::min(chunk_size, length + 1)));
  }
  Tensor indices = empty_ints({first_chunk[runs], 2});
  auto* index = indices.mutable_data_ptr<int32_t>();
  for (int64_t run = 0; run < runs; ++run) {
    for (int32_t chunk = 0; chunk < first_chunk[run + 1] - first_chunk[run]; ++chunk) {
      *index++ = static_cast<int32_t>(run);
      *index++ = chunk;
    }
  }
  return {std::move(indices), std::move(first)};
}

}  // namespace cuseq
