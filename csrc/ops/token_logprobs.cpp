#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/types.h"

// Log-probabilities of targets from hidden states and the weight of a language model's head, some
// tokens at a time: logits of all tokens are never in memory together.
namespace cuseq {
namespace {

constexpr int64_t kIgnored = -100;

struct Head {
  const Tensor& hidden;   // [N, D]
  const Tensor& weight;   // [V, D]
  const Tensor& targets;  // int64 [N]
  const OptionalTensor& bias;
  double temperature;
  int64_t chunk;
  bool entropy;

  int64_t tokens() const { return hidden.size(0); }
  int64_t vocabulary() const { return weight.size(0); }
  at::ScalarType wide() const {
    return hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
  at::TensorOptions numbers() const { return hidden.options().dtype(wide()); }
};

void check(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
           const OptionalTensor& bias, double temperature, OptionalInt chunk_size) {
  float_type(hidden, "hidden");
  TORCH_CHECK_VALUE(hidden.dim() == 2, "hidden must have shape [tokens, features], got ",
                    hidden.sizes());
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == hidden.size(1) && weight.size(0) > 0,
                    "weight must have shape [vocabulary, features = ", hidden.size(1), "], got ",
                    weight.sizes());
  TORCH_CHECK_VALUE(targets.dim() == 1 && targets.size(0) == hidden.size(0),
                    "targets must have one entry for each of the ", hidden.size(0), " tokens, got ",
                    targets.sizes());
  TORCH_CHECK_TYPE(targets.scalar_type() == at::kLong, "targets must be int64, got ",
                   dtype_name(targets.scalar_type()));
  TORCH_CHECK_TYPE(weight.scalar_type() == hidden.scalar_type(),
                   "weight must be of hidden's dtype, ", dtype_name(hidden.scalar_type()), ", got ",
                   dtype_name(weight.scalar_type()));
  const auto check_device = [&](const Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(tensor.device() == hidden.device(), name, " must lie on hidden's device, ",
                      hidden.device(), ", got ", tensor.device());
  };
  check_device(weight, "weight");
  check_device(targets, "targets");
  if (bias.has_value()) {
    check_device(*bias, "bias");
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                          bias->scalar_type() == weight.scalar_type(),
                      "bias must be [vocabulary = ", weight.size(0), "] of weight's dtype, got ",
                      dtype_name(bias->scalar_type()), " ", bias->sizes());
  }
  TORCH_CHECK_VALUE(std::isfinite(temperature) && temperature > 0,
                    "temperature must be a finite number above 0, got ", temperature);
  TORCH_CHECK_VALUE(chunk_size.value_or(1) >= 1, "chunk_size must be at least 1, got ",
                    chunk_size.value_or(1));
  if (!values_can_be_read(targets)) return;
  const Tensor host = targets.cpu();
  const auto* values = host.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < host.numel(); ++i) {
    TORCH_CHECK_VALUE((0 <= values[i] && values[i] < weight.size(0)) || values[i] == kIgnored,
                      "targets must lie in [0, ", weight.size(0), ") or be ", kIgnored,
                      ", got targets[", i, "] = ", values[i]);
  }
}

// Return how many tokens have their logits in memory together: by default half a gigabyte in fp32.
int64_t chunk_of(OptionalInt chunk_size, const Tensor& weight) {
  constexpr int64_t kLogits = int64_t{1} << 27;
  return chunk_size.value_or(std::max<int64_t>(1, kLogits / weight.size(0)));
}

// The tokens [first, first + count) of a call.
struct Chunk {
  Tensor hidden;   // [count, D]
  Tensor logits;   // [count, V], divided by the temperature
  Tensor targets;  // [count, 1], inside the vocabulary
  Tensor ignored;  // [count, 1]
};

template <typename F>
void for_each_chunk(const Head& head, const F& visit) {
  for (int64_t first = 0; first < head.tokens(); first += head.chunk) {
    const int64_t count = std::min(head.chunk, head.tokens() - first);
    Chunk chunk;
    chunk.hidden = head.hidden.narrow(0, first, count);
    chunk.logits = at::linear(chunk.hidden, head.weight, head.bias).to(head.wide());
    if (head.temperature != 1.0) chunk.logits.div_(head.temperature);
    const Tensor targets = head.targets.narrow(0, first, count).unsqueeze(1);
    chunk.ignored = targets.eq(kIgnored);
    chunk.targets = targets.clamp(0, head.vocabulary() - 1);  // those on a GPU are not checked
    visit(first, count, chunk);
  }
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Forward token_logprobs_kernel(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                              const OptionalTensor& bias, double temperature,
                              OptionalInt chunk_size, bool entropy) {
  check(hidden, weight, targets, bias, temperature, chunk_size);
  const Head head{hidden, weight, targets, bias, temperature, chunk_of(chunk_size, weight),
                  entropy};
  Tensor logprobs = at::empty({head.tokens()}, head.numbers());
  Tensor logsumexp = at::empty({head.tokens()}, head.numbers());
  Tensor entropies = at::empty({entropy ? head.tokens() : 0}, head.numbers());
  Tensor mean = at::empty({entropy ? head.tokens() : 0}, head.numbers());
  for_each_chunk(head, [&](int64_t first, int64_t count, const Chunk& chunk) {
    const Tensor total = chunk.logits.logsumexp(1, /*keepdim=*/true);
    const Tensor own = chunk.logits.gather(1, chunk.targets).sub_(total);
    logprobs.narrow(0, first, count).copy_(own.masked_fill_(chunk.ignored, 0).squeeze(1));
    logsumexp.narrow(0, first, count).copy_(total.squeeze(1));
    if (!entropy) return;
    const Tensor weights = chunk.logits.sub(total).exp_();
    // The product of a logit of -inf with its weight of zero counts as zero.
    const Tensor average = weights.mul_(chunk.logits).nan_to_num_(0.0).sum(1, /*keepdim=*/true);
    mean.narrow(0, first, count).copy_(average.squeeze(1));
    const Tensor spread = total.sub(average).masked_fill_(chunk.ignored, 0);
    entropies.narrow(0, first, count).copy_(spread.squeeze(1));
  });
  return {logprobs, entropies, logsumexp, mean};
}

// The sum of products over chunks: in fp32 where the operands are narrower and there are several.
class ProductSum {
 public:
  ProductSum(at::IntArrayRef sizes, const Head& head)
      : dtype_(head.hidden.scalar_type()),
        sum_(at::zeros(sizes,
                       head.tokens() > head.chunk ? head.numbers() : head.hidden.options())) {}

  void add(const Tensor& term) { sum_.add_(term); }
  Tensor result() const { return sum_.to(dtype_); }

 private:
  at::ScalarType dtype_;
  Tensor sum_;
};

std::tuple<Tensor, Tensor, Tensor> token_logprobs_backward_kernel(
    const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropies,
    const Tensor& logsumexp, const Tensor& mean, const Tensor& hidden, const Tensor& weight,
    const Tensor& targets, const OptionalTensor& bias, double temperature, OptionalInt chunk_size,
    bool entropy) {
  check(hidden, weight, targets, bias, temperature, chunk_size);
  const Head head{hidden, weight, targets, bias, temperature, chunk_of(chunk_size, weight),
                  entropy};
  const auto check_numbers = [&](const Tensor& numbers, const char* name, int64_t size) {
    TORCH_CHECK_VALUE(
        numbers.dim() == 1 && numbers.size(0) == size && numbers.scalar_type() == head.wide() &&
            numbers.device() == hidden.device(),
        name, " must be ", dtype_name(head.wide()), " [", size, "] on ", hidden.device(), ", got ",
        dtype_name(numbers.scalar_type()), " ", numbers.sizes());
  };
  check_numbers(logsumexp, "logsumexp", head.tokens());
  check_numbers(mean, "mean", entropy ? head.tokens() : 0);
  if (grad_logprobs.has_value()) check_numbers(*grad_logprobs, "grad_logprobs", head.tokens());
  const bool through_entropy = entropy && grad_entropies.has_value();
  if (through_entropy) check_numbers(*grad_entropies, "grad_entropies", head.tokens());
  Tensor grad_hidden = at::empty(hidden.sizes(), hidden.options());
  ProductSum grad_weight(weight.sizes(), head);
  ProductSum grad_bias({bias.has_value() ? weight.size(0) : 0}, head);
  for_each_chunk(head, [&](int64_t first, int64_t count, const Chunk& chunk) {
    const auto part = [&](const Tensor& numbers) {
      return numbers.narrow(0, first, count).unsqueeze(1);
    };
    const auto grad_of = [&](const OptionalTensor& grad) {
      const Tensor own = grad.has_value() ? part(*grad) : at::zeros({count, 1}, head.numbers());
      return own.masked_fill(chunk.ignored, 0);
    };
    const Tensor grad = grad_of(grad_logprobs);
    const Tensor weights = chunk.logits.sub(part(logsumexp)).exp_();
    // d logprob / d logit is (1 if it is the target's) - p, d entropy / d logit is p * (mean -
    // logit).
    Tensor grad_logits;
    if (through_entropy) {
      const Tensor away = chunk.logits.sub_(part(mean)).mul_(grad_of(grad_entropies)).add_(grad);
      grad_logits = away.mul_(weights).nan_to_num_(0.0).neg_();
    } else {
      grad_logits = weights.mul_(grad).neg_();
    }
    grad_logits.scatter_add_(1, chunk.targets, grad);
    if (temperature != 1.0) grad_logits.div_(temperature);
    const Tensor narrow = grad_logits.to(hidden.scalar_type());
    grad_hidden.narrow(0, first, count).copy_(at::mm(narrow, weight));
    grad_weight.add(at::mm(narrow.t(), chunk.hidden));
    if (bias.has_value()) grad_bias.add(grad_logits.sum(0));
  });
  return {grad_hidden, grad_weight.result(), grad_bias.result()};
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("token_logprobs", TORCH_FN(token_logprobs_kernel));
  m.impl("token_logprobs_backward", TORCH_FN(token_logprobs_backward_kernel));
}

}  // namespace cuseq
