#pragma once

#include <cstdint>

#include "cuseq/macros.h"
#include "ops/float_type.h"
#include "ops/kernel.h"

// Kernels over rows of logits, one for each token. They are not ops of their own:
// csrc/ops/token_logprobs.cpp runs them.
namespace cuseq {

constexpr int64_t kIgnoredTarget = -100;

// With x = scale * logits, or x = cap * tanh(scale * logits / cap) under a cap, and p = softmax(x),
// the forward computes
//   logsumexp = log(sum(exp(x))), logprob = x[target] - logsumexp,
//   mean = sum(p * x), entropy = logsumexp - mean,
// and the backward the gradient of the logits,
//   (grad_logprob * ([i == target] - p[i]) + grad_entropy * p[i] * (mean - x[i])) * dx/dlogits[i].
// A logit of -inf adds nothing. Numbers of rows are in fp32, or fp64 for fp64. A target that is
// ignored gives 0 and no gradient, one outside the vocabulary NaN and a gradient of NaN.
struct LogitRowsArgs {
  FloatType type{};        // of the logits
  void* logits = nullptr;  // [rows, vocabulary]; the backward replaces them by their gradient
  int64_t rows = 0;
  int64_t vocabulary = 0;
  double scale = 1;                  // over the temperature
  double cap = 0;                    // over the temperature; 0: none
  const int64_t* targets = nullptr;  // [rows]
  // Results of the forward, [rows]; the backward reads logsumexp and mean.
  void* logprobs = nullptr;
  void* logsumexp = nullptr;
  void* entropies = nullptr;  // null: not wanted
  void* mean = nullptr;       // null: not wanted
  // Gradients of the results, [rows]; null: zeros.
  const void* grad_logprobs = nullptr;
  const void* grad_entropies = nullptr;
};

// Return whether a target is a token of the vocabulary.
CUSEQ_HOST_DEVICE bool is_token(const LogitRowsArgs& args, int64_t target) {
  return target >= 0 && target < args.vocabulary;
}

namespace cpu {
void logit_rows(const LogitRowsArgs& args);
void logit_rows_backward(const LogitRowsArgs& args);
}  // namespace cpu

namespace cuda {
void logit_rows(const LogitRowsArgs& args, Stream stream);
void logit_rows_backward(const LogitRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace cuseq
