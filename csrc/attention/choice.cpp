#include "attention/choice.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "attention/measured.h"

namespace cuseq::attention {
namespace {

constexpr const char* kAuto = "auto";
constexpr const char* kNames =
    "\"auto\", \"flash\", \"fa4\", \"fa3\", \"flex\", \"efficient\" or \"segments\"";

const Backend* find_backend(const std::string& name) {
  const auto& all = backends();
  const auto found =
      std::ranges::find_if(all, [&](const Backend& one) { return name == one.name; });
  return found == all.end() ? nullptr : &*found;
}

// Return the backend that the call names. Raise ValueError if it cannot take the call.
const Backend& named_backend(const Call& call) {
  const std::string& name = call.backend;
  TORCH_CHECK_VALUE(name != "flex",
                    "backend=\"flex\" runs through cuseq.varlen_attention in Python, whose "
                    "compiled code it becomes a part of; this op cannot run it");
  const Backend* backend = find_backend(name);
#ifndef CUSEQ_WITH_CUDA
  TORCH_CHECK_VALUE(backend != nullptr || (name != "flash" && name != "efficient"), "backend=\"",
                    name, "\" needs the CUDA kernels, and this cuseq was built without them: ",
                    "reinstall it where nvcc and a CUDA build of torch are found");
#endif
  TORCH_CHECK_VALUE(backend != nullptr, "backend must be ", kNames, ", got \"", name, "\"");
  if (!backend->takes(call, nullptr)) {
    std::string why;
    backend->takes(call, &why);
    TORCH_CHECK_VALUE(false, "backend=\"", name, "\" cannot take this call: ", why,
                      "; backend=\"auto\" chooses one that can");
  }
  return *backend;
}

// The backends that take a call, sorted by descending preference.
using Candidates = c10::SmallVector<const Backend*, 8>;

Candidates candidates_for(const Call& call) {
  Candidates candidates;
  for (const Backend& backend : backends()) {
    if (backend.takes(call, nullptr)) candidates.push_back(&backend);
  }
  TORCH_INTERNAL_ASSERT(!candidates.empty(), "no attention backend takes the call");
  return candidates;
}

// Return the fastest candidate of a row of measurements, or null if none was measured.
const Backend* fastest_of(const Candidates& candidates, const Measured& row) {
  const Backend* fastest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Backend* backend : candidates) {
    const auto found = row.us.find(backend->name);
    if (found != row.us.end() && found->second < least) {
      fastest = backend;
      least = found->second;
    }
  }
  return fastest;
}

// Return which backends refuse the call and why, each after a semicolon.
std::string refusals(const Call& call) {
  std::ostringstream text;
  for (const Backend& backend : backends()) {
    std::string why;
    if (!backend.takes(call, &why)) text << "; " << backend.name << ": " << why;
  }
  return text.str();
}

// Return the row of measurements that decides about a call. Where none has its mask, those with a
// plain causal mask do, which are closer than no measurement. Spans and soft caps are not like it:
// most backends do not take them.
const Measured* measured_like(Facts facts) {
  const Measured* row = closest_measured(facts);
  if (row != nullptr || facts.mask == "spans" || facts.mask == "softcap") return row;
  facts.mask = "causal";
  facts.window = 0;
  return closest_measured(facts);
}

std::string measured_reason(const Measured& row, const Backend& fastest,
                            const Candidates& candidates) {
  std::ostringstream reason;
  reason << "the fastest where it was measured (sm_" << row.facts.sm << ", head_dim "
         << row.facts.head_dim << ", " << row.facts.mask << ", " << row.facts.tokens
         << " tokens in " << row.facts.sequences << " sequences): " << row.us.at(fastest.name)
         << " us";
  for (const Backend* other : candidates) {
    const auto found = row.us.find(other->name);
    if (other != &fastest && found != row.us.end()) {
      reason << ", " << other->name << " " << found->second;
    }
  }
  return reason.str();
}

// Return why the first candidate is chosen where nothing like the call was measured. PyTorch itself
// takes its flash kernels from sm_80 to sm_121 and its memory-efficient one from sm_50 on
// (sdp_utils.cpp of pytorch); the packages come after flash, since they were tried on sm_90 alone.
std::string rule_reason(const Candidates& candidates, int64_t sm) {
  std::ostringstream reason;
  reason
      << "a rule, not a measurement: usually the fastest, and nothing like this call was measured";
  if (sm > 0) {
    reason << " on sm_" << sm << " (to measure it, in a clone of cuseq: python -m benchmarks "
           << "attention_backends)";
  }
  reason << "; these take it too:";
  for (size_t i = 1; i < candidates.size(); ++i) {
    reason << (i > 1 ? ", " : " ") << candidates[i]->name;
  }
  return reason.str();
}

}  // namespace

const Backend& backend_of(const Call& call, std::string* reason) {
  if (call.backend != kAuto) {
    const Backend& named = named_backend(call);
    if (reason != nullptr) *reason = "it was asked for";
    return named;
  }
  const Candidates candidates = candidates_for(call);
  const Backend& preferred = *candidates.front();
  if (candidates.size() == 1) {
    if (reason != nullptr) *reason = "no other takes the call" + refusals(call);
    return preferred;
  }
  const Facts facts = facts_of(call);
  const Measured* row = measured_like(facts);
  const Backend* fastest = row == nullptr ? nullptr : fastest_of(candidates, *row);
  if (fastest == nullptr) {
    if (reason != nullptr) *reason = rule_reason(candidates, facts.sm) + refusals(call);
    return preferred;
  }
  if (reason != nullptr) *reason = measured_reason(*row, *fastest, candidates) + refusals(call);
  return *fastest;
}

}  // namespace cuseq::attention
