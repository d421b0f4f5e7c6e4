#include <ATen/ops/empty.h>

#include "ops/dtype_name.h"
#include "ops/types.h"
#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

template <typename Length>
void sum_costs(const Tensor& lengths, const Tensor& samples, const Tensor& begins,
               const Tensor& ends, double quadratic, double linear, double constant, double* out) {
  const auto length_of = lengths.accessor<const Length, 1>();
  const auto sample = samples.accessor<const int32_t, 1>();
  const auto begin = begins.accessor<const int64_t, 1>();
  const auto end = ends.accessor<const int64_t, 1>();
  for (int64_t row = 0; row < begins.numel(); ++row) {
    double sum = 0;
    for (int64_t i = begin[row]; i < end[row]; ++i) {
      const auto length = static_cast<double>(length_of[sample[i]]);
      sum += (quadratic * length + linear) * length + constant;
    }
    out[row] = sum;
  }
}

void check_rows(const Tensor& begins, const Tensor& ends, const Tensor& samples, int64_t set_size) {
  check_host_vector(begins, "begins");
  check_host_vector(ends, "ends");
  check_host_vector(samples, "samples");
  TORCH_CHECK_TYPE(begins.scalar_type() == at::kLong && ends.scalar_type() == at::kLong,
                   "begins and ends must be int64, got ", dtype_name(begins.scalar_type()), " and ",
                   dtype_name(ends.scalar_type()));
  TORCH_CHECK_TYPE(samples.scalar_type() == at::kInt, "samples must be int32, got ",
                   dtype_name(samples.scalar_type()));
  TORCH_CHECK_VALUE(begins.numel() == ends.numel(),
                    "begins and ends must have one value for each row, got ", begins.numel(),
                    " and ", ends.numel());
  const auto begin = begins.accessor<const int64_t, 1>();
  const auto end = ends.accessor<const int64_t, 1>();
  const auto sample = samples.accessor<const int32_t, 1>();
  for (int64_t row = 0; row < begins.numel(); ++row) {
    TORCH_CHECK_VALUE(0 <= begin[row] && begin[row] <= end[row] && end[row] <= samples.numel(),
                      "begins and ends must lie in [0, ", samples.numel(), "], got ", begin[row],
                      " and ", end[row], " for row ", row);
    for (int64_t i = begin[row]; i < end[row]; ++i) {
      TORCH_CHECK_VALUE(0 <= sample[i] && sample[i] < set_size, "samples must lie in [0, ",
                        set_size, "), got samples[", i, "] = ", sample[i]);
    }
  }
}

}  // namespace

Tensor row_costs(const Tensor& lengths, const Tensor& samples, const Tensor& begins,
                 const Tensor& ends, double quadratic, double linear, double constant) {
  check_host_vector(lengths, "lengths");
  check_rows(begins, ends, samples, lengths.numel());
  Tensor out = at::empty({begins.numel()}, at::TensorOptions().dtype(at::kDouble));
  auto* costs = out.mutable_data_ptr<double>();
  lengths.scalar_type() == at::kInt
      ? sum_costs<int32_t>(lengths, samples, begins, ends, quadratic, linear, constant, costs)
      : sum_costs<int64_t>(lengths, samples, begins, ends, quadratic, linear, constant, costs);
  return out;
}

}  // namespace cuseq
