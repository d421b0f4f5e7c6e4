#include "attention/choice.h"
#include "attention/inputs.h"
#include "attention/measured.h"
#include "attention/packages.h"
#include "attention/promise.h"
#include "python/bindings.h"

namespace cuseq::python {
namespace {

using attention::Facts;
using attention::Measured;
using Times = std::map<std::string, double, std::less<>>;

// The columns of the table in python/cuseq/_attention_table.csv, in their order.
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

std::optional<Times> closest_measured(const FactsRow& facts, const std::string& backend) {
  const Measured* row = attention::closest_measured(facts_from(facts), backend);
  return row == nullptr ? std::nullopt : std::optional<Times>(row->us);
}

// Check the arguments of cuseq::varlen_attention, in their order. Return the backend that the op
// would run, and why.
std::pair<std::string, std::string> attention_choice(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
    const OptionalTensor& host_meta, bool causal, std::optional<int64_t> window,
    std::optional<double> scale, std::optional<int64_t> max_seqlen_bound,
    const OptionalTensor& spans, const OptionalTensor& cu_seqlens_padded,
    std::optional<double> softcap, const std::string& backend, const OptionalTensor& rank_rows,
    const OptionalTensor& rank_meta, const std::string& rank_group, const OptionalTensor& tree_rows,
    const OptionalTensor& tree_meta) {
  const auto row = attention::row_of(
      q, k, v,
      {cu_seqlens, host_meta, causal, window, scale, max_seqlen_bound, spans, cu_seqlens_padded,
       softcap, backend, rank_rows, rank_meta, rank_group, tree_rows, tree_meta});
  std::string reason;
  const attention::Backend& chosen = attention::backend_of(row.call, &reason);
  return {chosen.name, reason};
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("set_measured_attention", &set_measured);
  m.def("closest_measured_attention", &closest_measured, py::arg(), py::arg("backend") = "");
  m.def("set_missing_attention", &attention::set_missing);
  m.def("missing_attention", &attention::why_missing);
  m.def("set_failed_attention", &attention::set_failed);
  m.def("set_attention_takes_two_rows", &attention::set_takes_two_rows);
  m.def("promise_sequences", &attention::promise_sequences);
  m.def("promised_sequences", &attention::promised_sequences);
  m.def("attention_choice", &attention_choice, Released());
}

}  // namespace cuseq::python
