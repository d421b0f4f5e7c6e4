#include "ops/gather_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

namespace cuseq::cpu {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// Copy the `n_dims` innermost dimensions and return the end of the written range.
unsigned char* copy(const GatheredTensor& tensor, int n_dims, const unsigned char* in,
                    unsigned char* out) {
  if (n_dims == 0) {
    std::memcpy(out, in, tensor.chunk_bytes);
    return out + tensor.chunk_bytes;
  }
  const int dim = n_dims - 1;
  for (int32_t i = 0; i < tensor.sizes[dim]; ++i) {
    out = copy(tensor, dim, in + i * tensor.strides[dim], out);
  }
  return out;
}

void fill(const GatheredTensor& tensor, unsigned char* out) {
  constexpr int64_t kStep = sizeof(tensor.fill);
  for (int64_t i = 0; i < tensor.row_bytes; i += kStep) {
    std::memcpy(out + i, tensor.fill, std::min<int64_t>(kStep, tensor.row_bytes - i));
  }
}

}  // namespace

void gather_rows(const GatherRowsArgs& args) {
  for (int i = 0; i < args.n_tensors; ++i) {
    const GatheredTensor& tensor = args.tensors[i];
    if (tensor.row_bytes == 0) continue;
    const auto* in = static_cast<const unsigned char*>(tensor.in);
    auto* out = static_cast<unsigned char*>(tensor.out);
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / tensor.row_bytes);
    at::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        unsigned char* to = out + row * tensor.row_bytes;
        const int32_t slot = args.index[row];
        if (slot < 0 || slot >= args.slots) {
          fill(tensor, to);
          continue;
        }
        const int64_t offset = slot / tensor.columns * tensor.slot_strides[0] +
                               slot % tensor.columns * tensor.slot_strides[1];
        copy(tensor, tensor.n_dims, in + offset, to);
      }
    });
  }
}

}  // namespace cuseq::cpu
