#include "attention/choice.h"
#include "attention/inputs.h"
#include "attention/options.h"
#include "attention/packages.h"
#include "attention/rank_share.h"
#include "attention/shared_plans.h"
#include "python/bindings.h"

namespace cuseq::python {
namespace {

using attention::Facts;
using attention::Measured;
using Times = std::map<std::string, double, std::less<>>;

// The columns of the table in python/cuseq/attention/table.csv, in their order.
using FactsRow =
    std::tuple<int64_t, bool, int64_t, std::string, int64_t, std::string, int64_t, int64_t>;

Facts facts_from(const FactsRow& row) {
  Facts facts;
  std::tie(facts.sm, facts.half, facts.head_dim, facts.mask, facts.window, facts.mode, facts.tokens,
           facts.sequences) = row;
  return facts;
}

void set_measured(const std::vector<std::pair<FactsRow, Times>>& rows) {
  std::vector<Measured> measured;
  measured.reserve(rows.size());
  for (const auto& [facts, us] : rows) measured.push_back({facts_from(facts), us});
  attention::set_measured(std::move(measured));
}

std::optional<Times> closest_measured(const FactsRow& facts, const std::string& backend,
                                      bool or_causal) {
  const auto find = or_causal ? attention::measured_like : attention::closest_measured;
  const Measured* row = find(facts_from(facts), backend);
  return row == nullptr ? std::nullopt : std::optional<Times>(row->us);
}

// Check the arguments of cuseq::varlen_attention, in their order. Return the backend that the op
// would run, and why. For a tree or a rank's part, which the op computes in several calls, it is
// the one of the first: the tokens' own nodes or pieces.
std::pair<std::string, std::string> attention_choice(const AttentionOptions& options,
                                                     const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v) {
  const attention::Row row = attention::row_of(q, k, v, options);
  const attention::Choice choice = attention::choose(row.call);
  return {choice.candidates.front().backend->name, attention::reason_of(row.call, choice)};
}

int64_t pairs_of_rank(const at::Tensor& rank_rows, const at::Tensor& rank_meta,
                      const at::Tensor& q) {
  return attention::RankShare::of(rank_rows, rank_meta, /*group=*/"", q).pairs();
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("set_measured_attention", &set_measured);
  m.def("closest_measured_attention", &closest_measured, py::arg(), py::arg("backend") = "",
        py::arg("or_causal") = false);
  m.def("set_missing_attention", &attention::set_missing);
  m.def("missing_attention", &attention::why_missing);
  m.def("set_registered_attention", &attention::set_registered);
  m.def("failed_attention", &attention::why_failed);
  m.def("missing_cudnn_attention", &attention::why_no_cudnn);
  m.def("cudnn_plan_sizes", [](int64_t sequences, int64_t longest, int64_t tokens) {
    const auto sizes = attention::plan_sizes(sequences, longest, tokens);
    return std::tuple(sizes.sequences, sizes.longest, sizes.tokens);
  });
  m.def("cudnn_plans", &attention::plans_made);
  m.def("pairs_of_rank", &pairs_of_rank, Released());
  m.def("attention_choice", &attention::Kernel<attention_choice>::call, Released());
  m.def("attention_backend_names", [] {
    return std::vector<std::string>(attention::kBackendNames.begin(),
                                    attention::kBackendNames.end());
  });
}

}  // namespace cuseq::python
