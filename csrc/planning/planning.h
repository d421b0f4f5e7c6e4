#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "context_parallel/plan.h"
#include "cuseq/macros.h"

// Planning on the host: which samples share a row, with the algorithms of csrc/packing, and which
// rank holds which tokens, with those of csrc/context_parallel. Python calls these functions as
// `_C.NAME`; they are not ops because they take no part in graphs. All tensors are on the CPU;
// lengths are int32 or int64.
namespace cuseq {

// Pack samples into rows of `capacity` tokens and return (indices, offsets, starts, piece_lengths),
// int64. Row b is the pieces [offsets[b], offsets[b + 1]); a piece is the tokens
// [start, start + length) of the sample with its index. `strategy` is "bfd", "ffd", "sequential" or
// "wrapped", `overlong` is "raise", "split" or "truncate".
CUSEQ_API std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bin_pack(
    const at::Tensor& lengths, int64_t capacity, std::string_view strategy,
    std::string_view overlong);

// Return entries [begin, end) of a pseudo-random order of [0, n), int64.
CUSEQ_API at::Tensor permutation(int64_t n, int64_t seed, int64_t begin, int64_t end);

// Pack the `carried` samples (int32) and entries [begin, end) of the set and return (samples int32,
// offsets int64). The set is ordered by `seed`, or by sample number without one. Samples longer
// than a row are left out.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> pack_window(const at::Tensor& lengths,
                                                         const at::Tensor& carried,
                                                         std::optional<int64_t> seed, int64_t begin,
                                                         int64_t end, int64_t capacity,
                                                         std::string_view strategy);

// Return the cost of each row samples[begin:end], float64: the sum over its samples of
// quadratic * length^2 + linear * length + constant. Samples are int32, begins and ends int64.
CUSEQ_API at::Tensor row_costs(const at::Tensor& lengths, const at::Tensor& samples,
                               const at::Tensor& begins, const at::Tensor& ends, double quadratic,
                               double linear, double constant);

// Plan which tokens of a row each rank of context parallelism holds. `segments` are the tokens of
// each document in memory, none if there is no padding between documents. `policy` is "auto",
// "contiguous", "ulysses" or "zigzag".
CUSEQ_API cp::Plan cp_plan(const at::Tensor& lengths, const std::optional<at::Tensor>& segments,
                           int64_t total_tokens, std::string_view policy, cp::Options options);

// Return whether the plan was made for documents and segments of these lengths; documents without
// tokens do not count.
CUSEQ_API bool cp_plan_is_for(const cp::Plan& plan, const at::Tensor& lengths,
                              const std::optional<at::Tensor>& segments, int64_t total_tokens);

// Return the tokens of all ranks, rank after rank, and the place of each token there, int32
// `[total_tokens]`.
CUSEQ_API std::tuple<at::Tensor, at::Tensor> cp_deal(const cp::Plan& plan);

// Return the pieces of a rank, int32 `[n, 3]`: document (n_seqs for the tail), begin and end.
CUSEQ_API at::Tensor cp_pieces(const cp::Plan& plan, int64_t rank);

// Return the lengths of the rank's pieces without padding, int32, and its share of the plan as
// rank_rows and rank_meta (csrc/context_parallel/share.h). `max_seqs` is the capacity of the row's
// offsets; `room` has the numbers of a cp::Room, for a CUDA graph.
using RoomNumbers = std::array<int64_t, 5>;
CUSEQ_API std::tuple<at::Tensor, at::Tensor, at::Tensor> cp_share(
    const cp::Plan& plan, int64_t rank, int64_t max_seqs, const std::optional<RoomNumbers>& room);

// Return the numbers of the most room that such a share can have.
CUSEQ_API RoomNumbers cp_most_room(const cp::Plan& plan, int64_t max_seqs);

// How a model with M-RoPE counts the positions of images and videos.
struct MropeRule {
  int64_t spatial_merge;   // patches of a token along the height and the width
  int64_t temporal_merge;  // frames of a video's token
  bool frames_apart;       // each frame of a video is a block of its own, with text between them
};

// Return the positions of a row with images, int64 `[4, 1, total_tokens]`: in the document, and in
// time, height and width. `types` (int8) is 0 for text, 1 for an image's token, 2 for a video's.
// Document i is the first lengths[i] of segments[i] tokens. Grids are int64 `[n, 3]`, in patches;
// `intervals` (float32) are the positions between the steps in time of each video, none for 1.
CUSEQ_API at::Tensor mrope_positions(const at::Tensor& types, const at::Tensor& lengths,
                                     const at::Tensor& segments, const at::Tensor& image_grids,
                                     const at::Tensor& video_grids, const at::Tensor& intervals,
                                     const MropeRule& rule);

// The patches of images as a vision tower takes them, image after image.
struct VisionRows {
  at::Tensor lengths;         // int64 [n_seqs], patches that see each other: of a frame or an image
  at::Tensor places;          // int64 [patches, 2], the row and the column of each in its image
  at::Tensor window_index;    // int64 [tokens], the tokens in the order of the windows
  at::Tensor window_lengths;  // int64 [n_windows], in patches
};

// Return the rows of images with grids int64 `[n, 3]`: frames, height and width in patches. A token
// is `merge * merge` patches, which follow one another. `window` is the side of a window in tokens;
// with 0 there are none. With `frames_apart` each frame is a sequence of its own.
CUSEQ_API VisionRows vision_rows(const at::Tensor& grids, int64_t merge, int64_t window,
                                 bool frames_apart);

// Return the blocks of a row as spans (start, end) in its tokens, those of one token left out.
// `blocks` (int64 `[rows, seqlen]`) has the number of each token's block in its row and document,
// -1 for none. Document i is the first lengths[i] of segments[i] tokens. None if a block of a
// document has other tokens between its own.
CUSEQ_API std::optional<std::vector<std::pair<int64_t, int64_t>>> block_spans(
    const at::Tensor& blocks, const at::Tensor& lengths, const at::Tensor& segments);

}  // namespace cuseq
