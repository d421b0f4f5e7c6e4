#include "attention/choice.h"

#include <algorithm>
#include <limits>
#include <sstream>

namespace cuseq::attention {
namespace {

constexpr const char* kAuto = "auto";
constexpr double kNotMeasured = std::numeric_limits<double>::infinity();

bool is_name(const std::string& name) {
  return std::ranges::find(kBackendNames, name) != kBackendNames.end();
}

std::string quoted_names() {
  std::ostringstream text;
  for (size_t i = 0; i < kBackendNames.size(); ++i) {
    if (i > 0) text << (i + 1 < kBackendNames.size() ? ", " : " or ");
    text << '"' << kBackendNames[i] << '"';
  }
  return text.str();
}

// Return the backend that the call names. Raise ValueError if it cannot take the call.
const Backend& named_backend(const Call& call) {
  const std::string& name = call.backend;
  TORCH_CHECK_VALUE(name != "flex",
                    "backend=\"flex\" runs through cuseq.varlen_attention in Python, whose "
                    "compiled code it becomes a part of; this op cannot run it");
  const auto& all = backends();
  const auto found =
      std::ranges::find_if(all, [&](const Backend& one) { return name == one.name; });
  if (found == all.end()) {
    TORCH_CHECK_VALUE(is_name(name), "backend must be ", quoted_names(), ", got \"", name, "\"");
    TORCH_CHECK_VALUE(false, "backend=\"", name,
                      "\" needs the CUDA kernels, and this cuseq was built without them: reinstall "
                      "it where nvcc and a CUDA build of torch are found");
  }
  if (!found->takes(call, nullptr)) {
    std::string why;
    found->takes(call, &why);
    TORCH_CHECK_VALUE(false, "backend=\"", name, "\" cannot take this call: ", why,
                      "; backend=\"auto\" chooses one that can");
  }
  return *found;
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

std::string measured_reason(const Choice& choice) {
  const Facts& facts = choice.row->facts;
  std::ostringstream reason;
  reason << "the fastest where it was measured (sm_" << facts.sm << ", head_dim " << facts.head_dim
         << ", " << facts.mask << ", " << facts.tokens << " tokens in " << facts.sequences
         << " sequences): " << choice.candidates.front().us << " us";
  for (size_t i = 1; i < choice.candidates.size(); ++i) {
    const auto& [other, us] = choice.candidates[i];
    if (us < kNotMeasured) reason << ", " << other->name << " " << us;
  }
  return reason.str();
}

// Return why the first candidate is chosen where nothing like the call was measured. PyTorch itself
// takes its flash kernels from sm_80 to sm_121 and its memory-efficient one from sm_50 on
// (sdp_utils.cpp of pytorch); the packages come after flash, since they were tried on sm_90 alone.
std::string rule_reason(const Choice& choice, int64_t sm) {
  std::ostringstream reason;
  reason
      << "a rule, not a measurement: usually the fastest, and nothing like this call was measured";
  if (sm > 0) {
    reason << " on sm_" << sm << " (to measure it, in a clone of cuseq: python -m benchmarks "
           << "attention_backends)";
  }
  reason << "; these take it too:";
  for (size_t i = 1; i < choice.candidates.size(); ++i) {
    reason << (i > 1 ? ", " : " ") << choice.candidates[i].backend->name;
  }
  return reason.str();
}

}  // namespace

Choice choose(const Call& call) {
  Choice choice;
  auto& candidates = choice.candidates;
  if (call.backend != kAuto) {
    candidates.push_back({&named_backend(call), kNotMeasured});
    return choice;
  }
  for (const Backend& backend : backends()) {
    if (backend.takes(call, nullptr)) candidates.push_back({&backend, kNotMeasured});
  }
  TORCH_INTERNAL_ASSERT(!candidates.empty(), "no attention backend takes the call");
  if (candidates.size() == 1) return choice;
  const Measured* row = measured_like(facts_of(call));
  if (row == nullptr) return choice;
  for (auto& [backend, us] : candidates) {
    const auto found = row->us.find(backend->name);
    if (found == row->us.end()) continue;
    us = found->second + (backend->extra_us != nullptr ? backend->extra_us(call) : 0.0);
  }
  // Backends lie in the order of preference, which decides among equals.
  std::ranges::sort(candidates, [](const Candidate& one, const Candidate& other) {
    return one.us != other.us ? one.us < other.us : one.backend < other.backend;
  });
  if (candidates.front().us < kNotMeasured) choice.row = row;
  return choice;
}

std::string reason_of(const Call& call, const Choice& choice) {
  if (call.backend != kAuto) return "it was asked for";
  if (choice.candidates.size() == 1) return "no other takes the call" + refusals(call);
  const std::string reason =
      choice.row != nullptr ? measured_reason(choice) : rule_reason(choice, capability_of(call.q));
  return reason + refusals(call);
}

}  // namespace cuseq::attention
