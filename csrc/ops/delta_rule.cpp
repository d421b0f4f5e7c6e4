#include "ops/delta_rule.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/mul.h>

#include <vector>

namespace cuseq {
namespace {

using at::Tensor;

// Rows of one step, and those of them whose document goes on to the rows from `end`.
struct Step {
  int64_t begin;
  int64_t end;
  int64_t lasting;

  Tensor now(const Tensor& rows) const { return rows.narrow(0, begin, end - begin); }
  Tensor going_on(const Tensor& rows) const { return rows.narrow(0, begin, lasting); }
  Tensor next(const Tensor& rows) const { return rows.narrow(0, end, lasting); }
};

std::vector<Step> steps_of(const DeltaRuleChunks& chunks) {
  std::vector<Step> steps;
  int64_t begin = 0;
  for (size_t i = 0; i < chunks.counts.size(); ++i) {
    const int64_t end = begin + chunks.counts[i] * chunks.heads;
    const int64_t further = i + 1 < chunks.counts.size() ? chunks.counts[i + 1] : 0;
    steps.push_back({begin, end, further * chunks.heads});
    begin = end;
  }
  return steps;
}

}  // namespace

Tensor delta_rule_states(const DeltaRuleChunks& chunks, const Tensor& values) {
  Tensor states = values.new_empty({values.size(0), chunks.reads.size(2), values.size(2)});
  const std::vector<Step> steps = steps_of(chunks);
  steps.front().now(states).zero_();
  for (const Step& step : steps) {
    step.now(values).baddbmm_(step.now(chunks.reads), step.now(states), 1, -1);
    if (step.lasting == 0) continue;
    Tensor after = step.next(states);
    at::mul_out(after, step.going_on(states), step.going_on(chunks.decay));
    after.baddbmm_(step.going_on(chunks.writes).mT(), step.going_on(values));
  }
  return states;
}

void delta_rule_gradients(const DeltaRuleChunks& chunks, const Tensor& states, const Tensor& values,
                          const DeltaRuleGradients& gradients) {
  const std::vector<Step> steps = steps_of(chunks);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (step->lasting > 0) {
      const Tensor later = step->next(gradients.states);
      Tensor of_writes = step->going_on(gradients.writes);
      at::bmm_out(of_writes, step->going_on(values), later.mT());
      step->going_on(gradients.values).baddbmm_(step->going_on(chunks.writes), later);
      step->going_on(gradients.states).addcmul_(later, step->going_on(chunks.decay));
    }
    step->now(gradients.states)
        .baddbmm_(step->now(chunks.reads).mT(), step->now(gradients.values), 1, -1);
  }
  const Tensor at_start = at::mul(gradients.states, states).sum({1, 2});
  for (const Step& step : steps) {
    if (step.lasting == 0) continue;
    step.going_on(gradients.decayed).select(1, -1).copy_(step.next(at_start));
  }
}

}  // namespace cuseq
