#pragma once

#include <cstdint>

#include "cuseq/macros.h"
#include "cuseq/seqlens.h"
#include "ops/kernel.h"

namespace cuseq {

// The rows of a tensor, for kernels that write the first or the last ones, as many as only the
// device knows. A row has `parts` parts, such as
// heads, of `bytes` consecutive bytes each. Strides are in bytes.
//
// Worked example: a logsumexp [heads, tokens] in fp32 has a row for each token, with `heads` parts
// of 4 bytes, part_stride 4 * tokens and row_stride 4.
struct RowBytes {
  char* data = nullptr;
  int64_t parts = 0;
  int64_t part_stride = 0;
  int64_t row_stride = 0;
  int64_t bytes = 0;
  int64_t unit = 1;  // bytes of one store, up to 16: divides the address and the numbers above

  // Stores into so many rows.
  CUSEQ_HOST_DEVICE int64_t stores(int64_t rows) const { return rows * parts * (bytes / unit); }

  // Return where the i-th store into the rows [first, end) goes.
  CUSEQ_HOST_DEVICE char* store(int64_t i, int64_t first, int64_t end) const {
    const int64_t units = bytes / unit;
    const int64_t part = i / units / (end - first);
    const int64_t row = first + i / units % (end - first);
    return data + part * part_stride + row * row_stride + i % units * unit;
  }
};

// Return a row's number that the device holds, inside the rows whatever it holds.
CUSEQ_HOST_DEVICE int64_t inside(const int32_t* number, int64_t num_rows) {
  const int64_t row = *number;
  return row < 0 ? 0 : row > num_rows ? num_rows : row;
}

// Arguments of zeroing the rows from *first on, of several tensors with as many rows.
struct ZeroTailArgs {
  static constexpr int kMostTensors = 5;

  RowBytes tensors[kMostTensors];
  int num_tensors = 0;
  const int32_t* first = nullptr;
  int64_t num_rows = 0;

  CUSEQ_HOST_DEVICE int64_t first_row() const { return inside(first, num_rows); }
};

// Arguments of copying the rows before *end, of several pairs of tensors with as many rows. The
// tensors of a pair have the same parts, bytes and unit.
struct CopyHeadArgs {
  static constexpr int kMostTensors = 2;

  RowBytes to[kMostTensors];
  RowBytes from[kMostTensors];
  int num_tensors = 0;
  const int32_t* end = nullptr;
  int64_t num_rows = 0;

  CUSEQ_HOST_DEVICE int64_t end_row() const { return inside(end, num_rows); }
};

namespace cpu {
void zero_tail(const ZeroTailArgs& args);
void copy_head(const CopyHeadArgs& args);
}  // namespace cpu

namespace cuda {
void zero_tail(const ZeroTailArgs& args, Stream stream);
void copy_head(const CopyHeadArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
