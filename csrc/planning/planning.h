#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "cuseq/macros.h"

// Which samples share a row: planned on the host alone, over csrc/packing. Python calls these as
// `_C.NAME`; they take no part in graphs, so they are not ops. Tensors in and out lie on the CPU,
// lengths are int32 or int64.
namespace cuseq {

// Packs samples into rows of `capacity` tokens: (indices, offsets, starts, piece_lengths), int64.
// Row b is the pieces [offsets[b], offsets[b + 1]); a piece is the tokens [start, start + length)
// of the sample with its index. `strategy` is "bfd", "ffd", "sequential" or "wrapped", `overlong`
// is "raise", "split" or "truncate".
CUSEQ_API std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bin_pack(
    const at::Tensor& lengths, int64_t capacity, std::string_view strategy,
    std::string_view overlong);

// Entries [begin, end) of a pseudo-random order of [0, n), int64.
CUSEQ_API at::Tensor permutation(int64_t n, int64_t seed, int64_t begin, int64_t end);

// Packs the `carried` samples (int32) and those at [begin, end) of the set, in the order that
// `seed` gives or in its own, and leaves out what is longer than a row: (samples int32, offsets
// int64).
CUSEQ_API std::tuple<at::Tensor, at::Tensor> pack_window(const at::Tensor& lengths,
                                                         const at::Tensor& carried,
                                                         std::optional<int64_t> seed, int64_t begin,
                                                         int64_t end, int64_t capacity,
                                                         std::string_view strategy);

// Costs of the rows samples[begin:end], float64: each the sum of
// quadratic * length^2 + linear * length + constant. Samples are int32, begins and ends int64.
CUSEQ_API at::Tensor row_costs(const at::Tensor& lengths, const at::Tensor& samples,
                               const at::Tensor& begins, const at::Tensor& ends, double quadratic,
                               double linear, double constant);

}  // namespace cuseq
