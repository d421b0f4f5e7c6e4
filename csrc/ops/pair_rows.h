#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/float_type.h"
#include "ops/kernel.h"

// Kernels that put together what several attention calls over parts of a row computed. They are
// not ops of their own: csrc/attention/compositions/ runs them.
namespace cuseq {

// The rows of a call that take part in it: those whose pair has queries and keys.
struct PairedRows {
  SeqLens own{};                   // offsets of these rows
  const int32_t* other = nullptr;  // [n_seqs + 1], offsets of the other side of the pairs

  // Return whether a row takes part; its pair is searched in [low, high].
  CUSEQ_HOST_DEVICE bool has(int64_t row, int64_t low, int64_t high) const {
    const int64_t pair = own.segment_of(row, low, high);
    return pair < own.n_seqs && row >= own.begin(pair) && other[pair + 1] > other[pair];
  }
  CUSEQ_HOST_DEVICE bool has(int64_t row) const { return has(row, 0, own.n_seqs); }
};

// Merge the attention of a call into that of others: out and logsumexp become those over the keys
// of all of them.
struct MergeRowsArgs {
  PairedRows rows;
  int64_t count = 0;  // rows, of which those in `rows` change
  int64_t heads = 0;
  int64_t dim = 0;
  FloatType type{};                      // of `part`; its logsumexp is fp64 for fp64, else fp32
  FloatType sum_type{};                  // of `out`: `type` or fp32
  const void* part = nullptr;            // [count, heads, dim]
  const void* part_logsumexp = nullptr;  // [heads, count]
  int64_t part_stride = 0;               // elements between heads
  void* out = nullptr;                   // [count, heads, dim]
  void* logsumexp = nullptr;             // [heads, count]
  int64_t stride = 0;
};

// Add rows to a sum.
struct AddRowsArgs {
  PairedRows rows;
  int64_t count = 0;
  int64_t width = 0;
  FloatType type{};
  FloatType sum_type{};        // `type` or fp32
  const void* part = nullptr;  // [count, width]
  void* sum = nullptr;         // [count, width]
};

namespace cpu {
void merge_rows(const MergeRowsArgs& args);
void add_rows(const AddRowsArgs& args);
}  // namespace cpu

namespace cuda {
void merge_rows(const MergeRowsArgs& args, Stream stream);
void add_rows(const AddRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
