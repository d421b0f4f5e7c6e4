#pragma once

#include <cstdint>

#include "cuseq/seqlens.h"
#include "ops/float_type.h"
#include "ops/kernel.h"

// The depthwise causal convolution: the arguments of its kernels, and which tokens reach which.
//
// With w of width K, the output of token t is the sum over lags i in [0, K) of w[K - 1 - i] times
// token t - i. A lag that would leave the token's sequence is left out or, with an initial state,
// reads the state: its last entry is the token before the sequence.
namespace cuseq {

constexpr int kMaxConvWidth = 4;
constexpr uint32_t kAllLags = (1u << kMaxConvWidth) - 1;

// The sequences of x: segments of one row, runs of equal seq_idx, or else the batch rows.
struct ConvSequences {
  Segments segments;                 // n_seqs and offsets; null offsets: none
  const int32_t* seq_idx = nullptr;  // [batch, tokens]; null: none
  int64_t seq_idx_strides[2] = {};   // batch, token; elements
  int64_t batch = 0;
  int64_t tokens = 0;  // of each batch row
  int width = 0;

  CUSEQ_HOST_DEVICE bool are_segments() const { return segments.seqlens.cu_seqlens != nullptr; }

  // Return the number of sequences that may have a state.
  CUSEQ_HOST_DEVICE int64_t count() const {
    return are_segments() ? segments.seqlens.n_seqs : batch;
  }

  // Return the sequence of a token, which is in segments [low, high].
  CUSEQ_HOST_DEVICE int64_t sequence_of(int64_t row, int64_t token, int64_t low,
                                        int64_t high) const {
    return are_segments() ? segments.seqlens.segment_of(token, low, high) : row;
  }

  CUSEQ_HOST_DEVICE int64_t begin(int64_t sequence) const {
    if (!are_segments()) return 0;
    const int64_t begin = segments.seqlens.begin(sequence);
    return begin > 0 ? begin : 0;
  }

  // Return the number of real tokens of a sequence; 0 for invalid offsets.
  CUSEQ_HOST_DEVICE int64_t length(int64_t sequence) const {
    if (!are_segments()) return tokens;
    const int64_t length = segments.real_end(sequence) - begin(sequence);
    return length > 0 ? length : 0;
  }

  CUSEQ_HOST_DEVICE int32_t idx(int64_t row, int64_t token) const {
    return seq_idx[row * seq_idx_strides[0] + token * seq_idx_strides[1]];
  }

  // Return a bit for each lag that stays in the token's row, and in its run of equal seq_idx.
  CUSEQ_HOST_DEVICE uint32_t row_lags(int64_t row, int64_t token) const {
    if (seq_idx == nullptr) return lags_from(token);
    const int32_t own = idx(row, token);
    if (own < 0) return 0;
    uint32_t bits = 1;
    for (int lag = 1; lag < width && lag <= token; ++lag) {
      bits |= idx(row, token - lag) == own ? 1u << lag : 0u;
    }
    return bits;
  }

  // Return a bit for each lag that stays in the token's sequence; 0 for padding and tail. Whatever
  // the offsets hold, no bit leads in front of token 0.
  CUSEQ_HOST_DEVICE uint32_t lags(int64_t row, int64_t token, int64_t low, int64_t high) const {
    if (!are_segments()) return row_lags(row, token);
    const int64_t segment = segments.seqlens.segment_of(token, low, high);
    return segments.is_real(token, segment) ? lags_from(token - begin(segment)) : 0;
  }

 private:
  // Return the lags of the token at a position of its sequence.
  CUSEQ_HOST_DEVICE uint32_t lags_from(int64_t position) const {
    return (1u << (position + 1 < width ? position + 1 : width)) - 1;
  }
};

// A tensor [batch, tokens, channels]. Strides count elements.
struct ConvRows {
  void* data = nullptr;
  int64_t strides[3] = {};

  CUSEQ_HOST_DEVICE int64_t at(int64_t row, int64_t token, int64_t channel) const {
    return row * strides[0] + token * strides[1] + channel * strides[2];
  }
};

// The width - 1 tokens before or at the end of each sequence, [n_seqs, channels, width - 1].
struct ConvStates {
  void* data = nullptr;  // null: none
  FloatType dtype = FloatType::kFloat32;
  int64_t strides[3] = {};

  CUSEQ_HOST_DEVICE int64_t at(int64_t sequence, int64_t channel, int64_t entry) const {
    return sequence * strides[0] + channel * strides[1] + entry * strides[2];
  }
};

struct ConvArgs {
  FloatType dtype = FloatType::kFloat32;
  ConvRows x;
  ConvRows out;  // for the backward: the gradient of x
  int64_t channels = 0;
  bool channel_major = false;    // whether tokens, not channels, are contiguous
  const void* weight = nullptr;  // [channels, width]
  int64_t weight_strides[2] = {};
  const void* bias = nullptr;  // [channels] or null
  int64_t bias_stride = 1;
  FloatType weight_dtype = FloatType::kFloat32;  // of weight and bias
  bool silu = false;
  ConvSequences sequences;
  ConvStates initial;
  ConvStates final;  // for the backward: its gradient
};

struct ConvBackwardArgs {
  ConvArgs conv;
  ConvRows grad_out;
  ConvStates grad_initial;
  void* grad_weight = nullptr;  // [channels, width], or null
  void* grad_bias = nullptr;    // [channels], or null
  // [n_partials, width + 1, channels], null without grad_weight: sums of parts of the tokens, the
  // lags' and then the bias'. float64 on the CPU, where one thread sums many tokens, else the dtype
  // of the arithmetic.
  void* partials = nullptr;
  int64_t n_partials = 0;
};

namespace cpu {
void causal_conv1d(const ConvArgs& args);
int64_t conv_partials(const ConvBackwardArgs& args);
void causal_conv1d_backward(const ConvBackwardArgs& args);
}  // namespace cpu

namespace cuda {
void causal_conv1d(const ConvArgs& args, Stream stream);
int64_t conv_partials(const ConvBackwardArgs& args);
void causal_conv1d_backward(const ConvBackwardArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
