#include "ops/logit_rows.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "cpu/float_types.h"

namespace cuseq::cpu {
namespace {

template <typename A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

template <typename A>
A& number(void* numbers, int64_t row) {
  return static_cast<A*>(numbers)[row];
}

template <typename A>
A number(const void* numbers, int64_t row) {
  return numbers == nullptr ? A(0) : static_cast<const A*>(numbers)[row];
}

// The values x of a row's logits: see LogitRowsArgs.
template <typename A>
struct Scaled {
  A scale, cap;

  explicit Scaled(const LogitRowsArgs& args)
      : scale(static_cast<A>(args.scale)), cap(static_cast<A>(args.cap)) {}

  A value(A logit) const { return cap == 0 ? logit * scale : cap * std::tanh(logit * scale / cap); }
  A slope(A value) const { return cap == 0 ? scale : scale * (1 - (value / cap) * (value / cap)); }
};

template <typename T>
void forward(const LogitRowsArgs& args, int64_t row) {
  using A = Arithmetic<T>;
  const T* logits = static_cast<const T*>(args.logits) + row * args.vocabulary;
  const Scaled<A> scaled(args);
  const auto logit = [&](int64_t i) { return scaled.value(static_cast<A>(logits[i])); };
  A most = -kInfinity<A>;
  for (int64_t i = 0; i < args.vocabulary; ++i) {
    const A x = logit(i);
    most = x > most ? x : most;
  }
  const A shift = most == -kInfinity<A> ? A(0) : most;
  double sum = 0, weighted = 0;  // one thread adds up tens of thousands of numbers
  for (int64_t i = 0; i < args.vocabulary; ++i) {
    const A x = logit(i);
    const A weight = std::exp(x - shift);
    sum += weight;
    if (x != -kInfinity<A>) weighted += weight * x;
  }
  const A total = shift + static_cast<A>(std::log(sum));
  number<A>(args.logsumexp, row) = total;
  const int64_t target = args.targets[row];
  const bool ignored = target == kIgnoredTarget;
  const A own = is_token(args, target) ? logit(target) : std::numeric_limits<A>::quiet_NaN();
  number<A>(args.logprobs, row) = ignored ? A(0) : own - total;
  if (args.entropies == nullptr) return;
  const A mean = static_cast<A>(weighted / sum);
  number<A>(args.mean, row) = mean;
  number<A>(args.entropies, row) = ignored ? A(0) : total - mean;
}

template <typename T>
void backward(const LogitRowsArgs& args, int64_t row) {
  using A = Arithmetic<T>;
  T* logits = static_cast<T*>(args.logits) + row * args.vocabulary;
  const Scaled<A> scaled(args);
  const int64_t target = args.targets[row];
  const bool ignored = target == kIgnoredTarget;
  const bool outside = !ignored && !is_token(args, target);
  const auto gradient = [&](const void* grads) {
    if (outside) return std::numeric_limits<A>::quiet_NaN();
    return ignored ? A(0) : number<A>(grads, row);
  };
  const A of_logprob = gradient(args.grad_logprobs);
  const A of_entropy = gradient(args.grad_entropies);
  const A total = number<A>(static_cast<const void*>(args.logsumexp), row);
  const A mean = number<A>(static_cast<const void*>(args.mean), row);
  for (int64_t i = 0; i < args.vocabulary; ++i) {
    const A x = scaled.value(static_cast<A>(logits[i]));
    A grad = i == target ? of_logprob : A(0);
    if (x != -kInfinity<A>) {
      grad -= std::exp(x - total) * (of_logprob + of_entropy * (x - mean));
    }
    logits[i] = static_cast<T>(grad * scaled.slope(x));
  }
}

}  // namespace

void logit_rows(const LogitRowsArgs& args) {
  dispatch_float(args.type, [&]<typename T>() {
    at::parallel_for(0, args.rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) forward<T>(args, row);
    });
  });
}

void logit_rows_backward(const LogitRowsArgs& args) {
  dispatch_float(args.type, [&]<typename T>() {
    at::parallel_for(0, args.rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) backward<T>(args, row);
    });
  });
}

}  // namespace cuseq::cpu
