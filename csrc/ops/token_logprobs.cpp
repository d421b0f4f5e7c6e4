#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/host_values.h"
#include "ops/logit_rows.h"
#include "ops/types.h"

// Log-probabilities of targets from hidden states and the weight of a language model's head, some
// tokens at a time: logits of all tokens are never in memory together.
namespace cuseq {
namespace {

struct Head {
  const Tensor& hidden;   // [N, D]
  const Tensor& weight;   // [V, D]
  const Tensor& targets;  // int64 [N]
  const OptionalTensor& bias;
  double temperature;
  int64_t chunk;
  double scale;
  OptionalDouble softcap;

  int64_t tokens() const { return hidden.size(0); }
  int64_t vocabulary() const { return weight.size(0); }
  at::ScalarType wide() const {
    return hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
  at::TensorOptions numbers() const { return hidden.options().dtype(wide()); }
};

// Raise unless `value`, and with it each ratio of two such values, has a reciprocal in fp32.
void check_factor(double value, const char* name) {
  TORCH_CHECK_VALUE(0x1p-60 <= value && value <= 0x1p60, name, " must be from 2^-60 to 2^60, got ",
                    value);
}

void check(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
           const OptionalTensor& bias, double temperature, OptionalInt chunk_size, double scale,
           OptionalDouble softcap) {
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
  check_factor(temperature, "temperature");
  check_factor(scale, "scale");
  if (softcap.has_value()) check_factor(*softcap, "softcap");
  TORCH_CHECK_VALUE(chunk_size.value_or(1) >= 1, "chunk_size must be at least 1, got ",
                    chunk_size.value_or(1));
  if (!values_can_be_read(targets)) return;
  const Tensor host = host_values(targets);
  const auto* values = host.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < host.numel(); ++i) {
    TORCH_CHECK_VALUE((0 <= values[i] && values[i] < weight.size(0)) || values[i] == kIgnoredTarget,
                      "targets must lie in [0, ", weight.size(0), ") or be ", kIgnoredTarget,
                      ", got targets[", i, "] = ", values[i]);
  }
}

// Return how many tokens have their logits in memory together: by default half a gigabyte in 16
// bits.
int64_t chunk_of(OptionalInt chunk_size, const Tensor& weight) {
  constexpr int64_t kLogits = int64_t{1} << 28;
  return chunk_size.value_or(std::max<int64_t>(1, kLogits / weight.size(0)));
}

// Call visit(first, hidden, logits, args) for the tokens of each chunk, with their logits in
// `args`.
template <typename F>
void for_each_chunk(const Head& head, const F& visit) {
  for (int64_t first = 0; first < head.tokens(); first += head.chunk) {
    const int64_t count = std::min(head.chunk, head.tokens() - first);
    const Tensor hidden = head.hidden.narrow(0, first, count);
    const Tensor logits = at::linear(hidden, head.weight, head.bias).contiguous();
    LogitRowsArgs args;
    args.type = float_type(logits, "hidden");
    args.logits = logits.mutable_data_ptr();
    args.rows = count;
    args.vocabulary = head.vocabulary();
    args.scale = head.scale / head.temperature;
    args.cap = head.softcap.value_or(0) / head.temperature;
    args.targets = head.targets.const_data_ptr<int64_t>() + first;
    visit(first, hidden, logits, args);
  }
}

// Return the numbers of the tokens from `first` on, or null if there are none.
void* numbers_from(const Tensor& numbers, int64_t first) {
  if (!numbers.defined() || numbers.numel() == 0) return nullptr;
  return static_cast<char*>(numbers.data_ptr()) + first * numbers.element_size();
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Forward token_logprobs_kernel(const Tensor& hidden, const Tensor& weight, const Tensor& any_targets,
                              const OptionalTensor& bias, double temperature,
                              OptionalInt chunk_size, bool entropy, double scale,
                              OptionalDouble softcap) {
  check(hidden, weight, any_targets, bias, temperature, chunk_size, scale, softcap);
  const Tensor targets = any_targets.contiguous();
  const Head head{hidden, weight, targets, bias, temperature, chunk_of(chunk_size, weight),
                  scale,  softcap};
  Tensor logprobs = at::empty({head.tokens()}, head.numbers());
  Tensor logsumexp = at::empty({head.tokens()}, head.numbers());
  Tensor entropies = at::empty({entropy ? head.tokens() : 0}, head.numbers());
  Tensor mean = at::empty({entropy ? head.tokens() : 0}, head.numbers());
  for_each_chunk(head, [&](int64_t first, const Tensor&, const Tensor&, LogitRowsArgs& args) {
    args.logprobs = numbers_from(logprobs, first);
    args.logsumexp = numbers_from(logsumexp, first);
    args.entropies = numbers_from(entropies, first);
    args.mean = numbers_from(mean, first);
    CUSEQ_RUN(logit_rows, hidden, args);
  });
  return {logprobs, entropies, logsumexp, mean};
}

// The sum of the chunks' terms: in fp32 where they are narrower and there are several.
class ChunkSum {
 public:
  explicit ChunkSum(const Head& head)
      : dtype_(head.hidden.scalar_type()),
        wide_(head.tokens() > head.chunk ? head.wide() : dtype_) {}

  void add(const Tensor& term) {
    if (sum_.defined()) {
      sum_.add_(term);
    } else {
      sum_ = term.to(wide_);
    }
  }

  // Return the sum, or zeros like `none` if there was no chunk.
  Tensor result(const Tensor& none) const {
    return sum_.defined() ? sum_.to(dtype_) : at::zeros(none.sizes(), none.options());
  }

 private:
  at::ScalarType dtype_;
  at::ScalarType wide_;
  Tensor sum_;
};

std::tuple<Tensor, Tensor, Tensor> token_logprobs_backward_kernel(
    const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropies,
    const Tensor& logsumexp, const Tensor& mean, const Tensor& hidden, const Tensor& weight,
    const Tensor& any_targets, const OptionalTensor& bias, double temperature,
    OptionalInt chunk_size, bool entropy, double scale, OptionalDouble softcap) {
  check(hidden, weight, any_targets, bias, temperature, chunk_size, scale, softcap);
  const Tensor targets = any_targets.contiguous();
  const Head head{hidden, weight, targets, bias, temperature, chunk_of(chunk_size, weight),
                  scale,  softcap};
  const auto checked = [&](const Tensor& numbers, const char* name, int64_t size) {
    TORCH_CHECK_VALUE(
        numbers.dim() == 1 && numbers.size(0) == size && numbers.scalar_type() == head.wide() &&
            numbers.device() == hidden.device(),
        name, " must be ", dtype_name(head.wide()), " [", size, "] on ", hidden.device(), ", got ",
        dtype_name(numbers.scalar_type()), " ", numbers.sizes());
    return numbers.contiguous();
  };
  const Tensor of_tokens = checked(logsumexp, "logsumexp", head.tokens());
  const Tensor means = checked(mean, "mean", entropy ? head.tokens() : 0);
  Tensor of_logprobs, of_entropies;  // undefined: zeros
  if (grad_logprobs.has_value()) {
    of_logprobs = checked(*grad_logprobs, "grad_logprobs", head.tokens());
  }
  if (entropy && grad_entropies.has_value()) {
    of_entropies = checked(*grad_entropies, "grad_entropies", head.tokens());
  }
  Tensor grad_hidden = at::empty(hidden.sizes(), hidden.options());
  ChunkSum grad_weight(head);
  ChunkSum grad_bias(head);
  const auto add_chunk = [&](int64_t first, const Tensor& rows, const Tensor& logits,
                             LogitRowsArgs& args) {
    args.logsumexp = numbers_from(of_tokens, first);
    args.mean = numbers_from(means, first);
    args.grad_logprobs = numbers_from(of_logprobs, first);
    args.grad_entropies = numbers_from(of_entropies, first);
    CUSEQ_RUN(logit_rows_backward, hidden, args);
    grad_hidden.narrow(0, first, rows.size(0)).copy_(at::mm(logits, weight));
    grad_weight.add(at::mm(logits.t(), rows));
    if (bias.has_value()) grad_bias.add(logits.sum(0, /*keepdim=*/false, head.wide()));
  };
  for_each_chunk(head, add_chunk);
  const Tensor no_bias = at::empty({0}, hidden.options());
  return {grad_hidden, grad_weight.result(weight), grad_bias.result(bias.value_or(no_bias))};
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("token_logprobs", TORCH_FN(token_logprobs_kernel));
  m.impl("token_logprobs_backward", TORCH_FN(token_logprobs_backward_kernel));
}

}  // namespace cuseq
