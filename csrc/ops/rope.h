#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/kernel.h"

// Rotary position embedding: what its kernels see, and which angle belongs to which token.

namespace cuseq {

enum class FloatType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// One of the tensors that rotate together, as [batch, tokens, heads, head_dim] whatever its layout.
struct RopeTensor {
  const void* in = nullptr;
  void* out = nullptr;  // may be `in`
  int64_t heads = 0;
  int64_t in_strides[3] = {};  // batch, token, head; elements. The last dimension has stride 1.
  int64_t out_strides[3] = {};
};

enum class PositionSource : int32_t {
  kDense,     // counted in each batch row
  kSegments,  // counted in each segment of the flat row
  kIds,       // given for each token
  kToken,     // the table has a row for each token
};

struct RopePositions {
  PositionSource source = PositionSource::kDense;
  int64_t first = 0;          // kDense: of the first token
  int64_t global_tokens = 0;  // kDense, kSegments: tokens of the row over all ranks
  SeqLens seqlens{};          // kSegments: global offsets
  const void* ids = nullptr;  // kIds
  bool ids_are_int64 = false;
  int64_t id_strides[3] = {};  // plane, batch, token; elements
  int64_t cp_size = 1;
  int64_t cp_rank = 0;

  CUSEQ_HOST_DEVICE int64_t dense(int64_t token) const {
    return first + (cp_size == 1 ? token : zigzag_position(token, global_tokens, cp_size, cp_rank));
  }

  // `token` counts in this rank's part of the flat row; its segment is that of token * cp_size.
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
  int64_t rows = 0;             // positions that it holds
  int64_t cos_strides[3] = {};  // plane, batch, row; elements
  int64_t sin_strides[3] = {};
  int64_t column_step = 1;  // 2 where each angle stands twice, side by side
};

enum class Planes : int32_t { kOne, kBlocked, kInterleaved };

// Multimodal positions: time, height and width turn different pairs.
struct RopePlanes {
  Planes kind = Planes::kOne;
  int64_t ends[3] =
      {};  // kBlocked: where the section of each plane ends; kInterleaved: 3 * section

  CUSEQ_HOST_DEVICE int count() const { return kind == Planes::kOne ? 1 : 3; }

  // Blocked (Qwen2-VL): ttt hhh www. Interleaved (Qwen3-VL): thw thw ... t, the rest being time.
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
  int64_t tokens = 0;  // of each batch row
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  bool interleaved = false;  // pairs (2i, 2i + 1), not (i, i + rotary_dim / 2)
  bool conjugate = false;    // turns back
  RopePositions positions;
  RopeTable table;
  RopePlanes planes;
};

// RMS norm of each head in front of the rotation.
struct HeadNorm {
  const void* weight = nullptr;  // [head_dim]
  void* rstd = nullptr;  // [batch, tokens, heads] in the arithmetic's type; forward writes it

  // Backward, where `in` and `out` of the rotated tensor are gradients.
  const void* input = nullptr;
  int64_t input_strides[3] = {};
  void* weight_grad = nullptr;  // [head_dim] of the weight's type, or null
};

struct QkNormRopeArgs {
  RopeArgs rope;
  HeadNorm norms[2];
  FloatType weight_dtype = FloatType::kFloat32;
  double eps = 0.0;
  double mean_factor = 0.0;  // 1 / head_dim
  double weight_offset = 0.0;
  // Backward: [n_partials, 2, head_dim], or null; float64 on the CPU, where one thread adds up many
  // tokens, the arithmetic's type elsewhere.
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
