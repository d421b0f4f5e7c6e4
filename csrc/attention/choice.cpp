#include "attention/choice.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "attention/measured.h"

namespace cuseq::attention {
namespace {

constexpr const char* kAuto = "auto";
constexpr const char* kNames =
    "\"auto\", \"flash\", \"fa4\", \"fa3\", \"flex\", \"efficient\" or \"segments\"";

struct Missing {
  std::mutex mutex;
  std::map<std::string, std::string> why;
};

Missing& missing() {
  static auto* all = new Missing();
  return *all;
}

const Backend* find_backend(const std::string& name) {
  const auto& all = backends();
  const auto found =
      std::ranges::find_if(all, [&](const Backend& one) { return name == one.name; });
  return found == all.end() ? nullptr : &*found;
}

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
  const std::string obstacle = backend->obstacle(call);
  TORCH_CHECK_VALUE(obstacle.empty(), "backend=\"", name, "\" cannot take this call: ", obstacle,
                    "; backend=\"auto\" chooses one that can");
  return *backend;
}

struct Candidates {
  std::vector<const Backend*> all;

  explicit Candidates(const Call& call) {
    for (const Backend& backend : backends()) {
      if (backend.obstacle(call).empty()) all.push_back(&backend);
    }
    TORCH_INTERNAL_ASSERT(!all.empty(), "no attention backend takes the call");
  }

  // Return the fastest candidate of a row of measurements, or null if none was measured.
  const Backend* fastest(const Measured* row) const {
    if (row == nullptr) return nullptr;
    const Backend* best = nullptr;
    double least = 0;
    for (const Backend* backend : all) {
      const auto found = row->us.find(backend->name);
      if (found == row->us.end()) continue;
      if (best == nullptr || found->second < least) {
        best = backend;
        least = found->second;
      }
    }
    return best;
  }
};

std::string measured_reason(const Measured& row, const Backend& chosen, const Candidates& among) {
  std::ostringstream reason;
  reason << "the fastest where it was measured (sm_" << row.facts.sm << ", head_dim "
         << row.facts.head_dim << ", " << row.facts.mask << ", " << row.facts.tokens
         << " tokens in " << row.facts.sequences << " sequences): " << row.us.at(chosen.name)
         << " us";
  for (const Backend* other : among.all) {
    const auto found = row.us.find(other->name);
    if (other != &chosen && found != row.us.end()) {
      reason << ", " << other->name << " " << found->second;
    }
  }
  return reason.str();
}

}  // namespace

const Backend& backend_of(const Call& call) {
  if (call.backend != kAuto) return named_backend(call);
  const Candidates candidates(call);
  if (candidates.all.size() == 1) return *candidates.all.front();
  const Backend* fastest = candidates.fastest(closest_measured(facts_of(call)));
  return fastest == nullptr ? *candidates.all.front() : *fastest;
}

Choice explained_choice(const Call& call) {
  if (call.backend != kAuto) return {&named_backend(call), "it was asked for"};
  const Candidates candidates(call);
  if (candidates.all.size() == 1) {
    std::ostringstream reason;
    reason << "no other takes the call";
    for (const Backend& other : backends()) {
      if (&other == candidates.all.front()) continue;
      reason << "; " << other.name << ": " << other.obstacle(call);
    }
    return {candidates.all.front(), reason.str()};
  }
  const Measured* row = closest_measured(facts_of(call));
  const Backend* fastest = candidates.fastest(row);
  if (fastest != nullptr) return {fastest, measured_reason(*row, *fastest, candidates)};
  return {candidates.all.front(), "usually the fastest; nothing like this call was measured"};
}

void set_missing(const std::string& name, const std::string& why) {
  const std::lock_guard<std::mutex> guard(missing().mutex);
  missing().why[name] = why;
}

std::string why_missing(const std::string& name) {
  const std::lock_guard<std::mutex> guard(missing().mutex);
  const auto found = missing().why.find(name);
  return found == missing().why.end() ? "its kernels are launched from Python, through "
                                        "cuseq.varlen_attention"
                                      : found->second;
}

}  // namespace cuseq::attention
