#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/float_type.h"
#include "ops/kernel.h"

// Rotary position embedding: the arguments of its kernels, and the position of each token.

namespace cuseq {

// One of the tensors that are rotated together, as [batch, tokens, heads, head_dim] for every
// qkv_format.
struct RopeTensor {
  const void* in = nullptr;
  void* out = nullptr;  // may be `in`
  int64_t heads = 0;
  int64_t in_strides[3] = {};  // batch, token, head; elements. The last dimension has stride 1.
  int64_t out_strides[3] = {};
};

enum class PositionSource : int32_t {
  kDense,     // position in the batch row
  kSegments,  // position in the segment of the flat row
  kIds,       // position_ids, given for each token
  kToken,     // none: the table has a row for each token
};

struct RopePositions {
  PositionSource source = PositionSource::kDense;
  int64_t first = 0;          // kDense: position of the first token
  int64_t global_tokens = 0;  // kDense, kSegments: tokens of the row on all ranks together
  SeqLens seqlens{};          // kSegments: global offsets
  const void* ids = nullptr;  // kIds
  bool ids_are_int64 = false;
  int64_t id_strides[3] = {};  // plane, batch, token; elements
  int64_t cp_size = 1;
  int64_t cp_rank = 0;

  CUSEQ_HOST_DEVICE int64_t dense(int64_t token) const {
    return first + (cp_size == 1 ? token : zigzag_position(token, global_tokens, cp_size, cp_rank));
  }

  // `token` is an index into this rank's part of the flat row; its segment is that of token *
  // cp_size.
  CUSEQ_HOST_DEVICE int64_t in_segment(int64_t token, int64_t segment) const {
    const int64_t begin = seqlens.begin(segment);
    if (cp_size == 1) return token - begin;
    const int64_t end = segment < seqlens.n_seqs ? seqlens.begin(segment + 1) : global_tokens;
    return zigzag_position(token - divide_tokens(begin, cp_size), end - begin, cp_size, cp_rank);
  }

  CUSEQ_HOST_DEVICE int64_t given(int64_t plane, int64_t batch, int64_t token) const {
    const int64_t i = plane * id_strides[0] + batch * id_strides[1] + token * id_strides[2];
    return ids_are_int64 ? static_cast<const int64_t*>(ids)[i]
                         : static_cast<const int32_t*>(ids)[i];
  }
};

struct RopeTable {
  const void* cos = nullptr;
  const void* sin = nullptr;
  FloatType dtype = FloatType::kFloat32;
  int64_t rows = 0;             // number of positions
  int64_t cos_strides[3] = {};  // plane, batch, row; elements
  int64_t sin_strides[3] = {};
  int64_t column_step = 1;  // 2 if each angle is stored twice, side by side
};

enum class Planes : int32_t { kOne, kBlocked, kInterleaved };

// Multimodal positions: time, height and width rotate different pairs.
struct RopePlanes {
  Planes kind = Planes::kOne;
  // kBlocked: end of each plane's section; kInterleaved: 3 * section
  int64_t ends[3] = {};

  CUSEQ_HOST_DEVICE int count() const { return kind == Planes::kOne ? 1 : 3; }

  // Return the plane that rotates a pair. Blocked (Qwen2-VL): ttt hhh www. Interleaved (Qwen3-VL):
  // thw thw ... t; the remaining pairs belong to time.
  CUSEQ_HOST_DEVICE int plane_of(int pair) const {
    if (kind == Planes::kOne) return 0;
    if (kind == Planes::kBlocked) return pair < ends[0] ? 0 : (pair < ends[1] ? 1 : 2);
    const int plane = pair % 3;
    return pair < ends[plane] ? plane : 0;
  }
};

struct RopeArgs {
  RopeTensor tensors[2];
  int n_tensors = 0;
  FloatType dtype = FloatType::kFloat32;
  int64_t batch = 0;
  int64_t tokens = 0;  // tokens of each batch row
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  bool interleaved = false;  // pairs (2i, 2i + 1), not (i, i + rotary_dim / 2)
  bool inverse = false;      // rotate by the negative angles
  RopePositions positions;
  RopeTable table;
  RopePlanes planes;
};

// RMS norm of each head, applied before the rotation.
struct HeadNorm {
  const void* weight = nullptr;  // [head_dim]
  // [batch, tokens, heads], in the dtype of the arithmetic; written by the forward
  void* rstd = nullptr;

  // For the backward, in which `in` and `out` of the RopeTensor are gradients.
  const void* input = nullptr;
  int64_t input_strides[3] = {};
  void* weight_grad = nullptr;  // [head_dim] in the weight's dtype, or null
};

struct QkNormRopeArgs {
  RopeArgs rope;
  HeadNorm norms[2];
  FloatType weight_dtype = FloatType::kFloat32;
  double eps = 0.0;
  double mean_factor = 0.0;  // 1 / head_dim
  double weight_offset = 0.0;
  // For the backward: [n_partials, 2, head_dim], or null. float64 on the CPU, where one thread sums
  // many tokens, else the dtype of the arithmetic.
  void* partials = nullptr;
  int64_t n_partials = 0;
};

namespace cpu {
void apply_rope(const RopeArgs& args);
void apply_qk_norm_rope(const QkNormRopeArgs& args);
int64_t qk_norm_rope_partials(const QkNormRopeArgs& args);
void apply_qk_norm_rope_backward(const QkNormRopeArgs& args);
}  // namespace cpu

namespace cuda {
void apply_rope(const RopeArgs& args, Stream stream);
void apply_qk_norm_rope(const QkNormRopeArgs& args, Stream stream);
int64_t qk_norm_rope_partials(const QkNormRopeArgs& args);
void apply_qk_norm_rope_backward(const QkNormRopeArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
