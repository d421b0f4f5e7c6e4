#include "attention/merge.h"

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/pair_rows.h"

namespace cuseq::attention {
namespace {

// Return the rows of `own` whose pair has rows of `other` too.
PairedRows paired(const Sequences& own, const Sequences& other) {
  PairedRows rows;
  rows.own = {own.offsets.const_data_ptr<int32_t>(), own.count()};
  rows.other = other.offsets.const_data_ptr<int32_t>();
  return rows;
}

}  // namespace

void merge(const Tensor& out, const Tensor& logsumexp, const Call& call, const Output& part) {
  const auto& [part_out, part_logsumexp] = part;
  MergeRowsArgs args;
  args.rows = paired(call.queries, call.keys);
  args.count = part_out.size(0);
  args.heads = out.size(1);
  args.dim = out.size(2);
  args.type = float_type(part_out, "out");
  args.sum_type = float_type(out, "out");
  args.part = part_out.const_data_ptr();
  args.part_logsumexp = part_logsumexp.const_data_ptr();
  args.part_stride = part_logsumexp.stride(0);
  args.out = out.mutable_data_ptr();
  args.logsumexp = logsumexp.mutable_data_ptr();
  args.stride = logsumexp.stride(0);
  CUSEQ_RUN(merge_rows, out, args);
}

void add(const Tensor& sum, const Tensor& part, const Sequences& own, const Sequences& other) {
  AddRowsArgs args;
  args.rows = paired(own, other);
  args.count = part.size(0);
  args.width = part.size(1) * part.size(2);
  args.type = float_type(part, "grad");
  args.sum_type = float_type(sum, "grad");
  args.part = part.const_data_ptr();
  args.sum = sum.mutable_data_ptr();
  CUSEQ_RUN(add_rows, sum, args);
}

}  // namespace cuseq::attention
