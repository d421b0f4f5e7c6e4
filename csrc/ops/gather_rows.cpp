#include <ATen/Dispatch_v2.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/empty.h>
#include <c10/util/overflows.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "cuseq/ops.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/gather_rows.h"
#include "ops/types.h"

namespace cuseq {
namespace {

using at::Scalar;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Scalars = at::ArrayRef<Scalar>;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::vector<Tensor> call_gather_rows(TensorList tensors, const Tensor& index, const Tensor& inverse,
                                     c10::SymIntArrayRef rows, int64_t leading, Scalars fill) {
  static const auto op =
      find_op<std::vector<Tensor>(TensorList, const Tensor&, const Tensor&, c10::SymIntArrayRef,
                                  int64_t, Scalars)>("cuseq::gather_rows");
  return op.call(tensors, index, inverse, rows, leading, fill);
}

void check_indices(const Tensor& indices, const char* name) {
  TORCH_CHECK_TYPE(indices.scalar_type() == at::kInt, name, " must be int32, got ",
                   dtype_name(indices.scalar_type()));
  TORCH_CHECK_VALUE(indices.dim() == 1 && indices.is_contiguous(), name,
                    " must be contiguous with one dimension, got shape ", indices.sizes(),
                    " and strides ", indices.strides());
  TORCH_CHECK_VALUE(indices.numel() <= kMaxInt32, name, " must have fewer than 2^31 entries, got ",
                    indices.numel());
}

// Return the product of one or two sizes, or -1 if a size is negative or above 2^31 - 1.
int64_t product(at::IntArrayRef sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || size > kMaxInt32) return -1;
    product *= size;
  }
  return product;
}

void check_tensor(const Tensor& tensor, size_t i, const Tensor& first, const Tensor& index,
                  int64_t leading, int64_t slots) {
  TORCH_CHECK_VALUE(tensor.device() == index.device(), "tensors[", i,
                    "] must lie where index does, on ", index.device(), ", got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.dim() >= leading, "tensors[", i,
                    "] must have at least leading = ", leading, " dimensions, got shape ",
                    tensor.sizes());
  const at::IntArrayRef sizes = tensor.sizes().slice(0, leading);
  TORCH_CHECK_VALUE(product(sizes) == slots, "tensors[", i, "] must have inverse.numel() = ", slots,
                    " slots in its leading dimensions, got ", sizes);
  TORCH_CHECK_VALUE(sizes == first.sizes().slice(0, leading), "tensors[", i,
                    "] must have the leading dimensions of tensors[0], ",
                    first.sizes().slice(0, leading), ", got ", sizes);
  TORCH_CHECK_VALUE(tensor.dim() == leading || tensor.numel() == 0 || tensor.size(-1) == 1 ||
                        tensor.stride(-1) == 1,
                    "tensors[", i, "] must be contiguous in its last dimension, got strides ",
                    tensor.strides());
}

// Return whether a fill value is representable. Floats may round, as everywhere in PyTorch;
// integers must be exact.
template <typename T>
bool represents(const Scalar& fill) {
  if constexpr (std::is_integral_v<T>) {
    if (fill.isComplex()) return false;
    if (fill.isFloatingPoint()) {
      const double value = fill.toDouble();
      // Larger values are whole numbers, but do not fit in int64.
      if (std::trunc(value) != value || std::abs(value) >= 0x1p63) return false;
    }
    return !c10::overflows<T, int64_t>(fill.to<int64_t>(), /*strict_unsigned=*/true);
  } else {
    return !c10::overflows<T, c10::complex<double>>(fill.to<c10::complex<double>>());
  }
}

void write_fill(const Scalar& fill, at::ScalarType dtype, size_t i, GatheredTensor& gathered) {
  AT_DISPATCH_V2(dtype, "gather_rows", AT_WRAP([&] {
                   TORCH_CHECK_VALUE(represents<scalar_t>(fill), "fill[", i,
                                     "] must be representable in the dtype of tensors[", i, "], ",
                                     dtype_name(dtype), ", got ", fill);
                   const auto value = fill.to<scalar_t>();
                   for (size_t at = 0; at < sizeof(gathered.fill); at += sizeof(value)) {
                     std::memcpy(gathered.fill + at, &value, sizeof(value));
                   }
                 }),
                 AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
                 AT_EXPAND(AT_FLOAT8_TYPES), at::kBool, at::kHalf, at::kBFloat16, at::kComplexHalf);
}

// Describe where the slots lie. The stride of a dimension of size 1 is set to 0, so that it does
// not prevent vectorised access.
void read_slots(const Tensor& tensor, int64_t leading, int64_t slots, GatheredTensor& gathered) {
  const int64_t size = tensor.element_size();
  const auto stride = [&](int64_t dim) {
    return tensor.size(dim) <= 1 ? 0 : tensor.stride(dim) * size;
  };
  const int64_t columns = std::max<int64_t>(1, tensor.size(leading - 1));
  gathered.columns = static_cast<int32_t>(columns);
  gathered.slot_strides[1] = stride(leading - 1);
  if (leading == 1) return;
  gathered.slot_strides[0] = stride(0);
  if (columns == 1 || stride(0) == columns * stride(1)) {  // collapses to one dimension
    gathered.columns = static_cast<int32_t>(std::max<int64_t>(1, slots));
    gathered.slot_strides[1] = columns == 1 ? stride(0) : stride(1);
  }
}

// Describe the memory of a slot: a contiguous chunk, and the dimensions around it that do not
// collapse into it or into each other.
void read_trailing(const Tensor& tensor, size_t i, int64_t leading, GatheredTensor& gathered) {
  const int64_t bytes = c10::multiply_integers(tensor.sizes().slice(leading)) *
                        static_cast<int64_t>(tensor.element_size());
  TORCH_CHECK_VALUE(bytes <= kMaxInt32, "tensors[", i,
                    "] must have fewer than 2^31 bytes in a slot, got ", bytes);
  gathered.row_bytes = static_cast<int32_t>(bytes);
  gathered.chunk_bytes = static_cast<int32_t>(tensor.element_size());
  if (bytes == 0) return;
  for (int64_t dim = tensor.dim() - 1; dim >= leading; --dim) {
    const auto size = static_cast<int32_t>(tensor.size(dim));
    const int64_t stride = tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
    const int last = gathered.n_dims - 1;
    if (size == 1) continue;
    if (last < 0 && stride == gathered.chunk_bytes) {
      gathered.chunk_bytes *= size;
    } else if (last >= 0 && stride == gathered.sizes[last] * gathered.strides[last]) {
      gathered.sizes[last] *= size;
    } else {
      TORCH_CHECK_VALUE(gathered.n_dims < kMaxGatheredDims, "tensors[", i, "] must have at most ",
                        kMaxGatheredDims, " trailing dimensions that do not collapse, got sizes ",
                        tensor.sizes(), " and strides ", tensor.strides());
      gathered.sizes[gathered.n_dims] = size;
      gathered.strides[gathered.n_dims++] = stride;
    }
  }
}

std::vector<Tensor> gather_rows_kernel(TensorList tensors, const Tensor& index,
                                       const Tensor& inverse, at::IntArrayRef rows, int64_t leading,
                                       Scalars fill) {
  check_indices(index, "index");
  check_indices(inverse, "inverse");
  TORCH_CHECK_VALUE(inverse.device() == index.device(), "inverse must lie where index does, on ",
                    index.device(), ", got ", inverse.device());
  TORCH_CHECK_VALUE(leading == 1 || leading == 2, "leading must be 1 or 2, got ", leading);
  TORCH_CHECK_VALUE((rows.size() == 1 || rows.size() == 2) && product(rows) == index.numel(),
                    "rows must be one or two sizes whose product is index.numel() = ",
                    index.numel(), ", got ", rows);
  TORCH_CHECK_VALUE(fill.size() == tensors.size(), "fill must hold one number for each of ",
                    tensors.size(), " tensors, got ", fill.size());
  const int64_t slots = inverse.numel();
  std::vector<GatheredTensor> gathered(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(tensors[i], i, tensors[0], index, leading, slots);
    write_fill(fill[i], tensors[i].scalar_type(), i, gathered[i]);
    read_slots(tensors[i], leading, slots, gathered[i]);
    read_trailing(tensors[i], i, leading, gathered[i]);
  }
  std::vector<Tensor> outputs;
  outputs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::DimVector shape(rows);
    shape.append(tensors[i].sizes().begin() + leading, tensors[i].sizes().end());
    outputs.push_back(at::empty(shape, tensors[i].options()));
    gathered[i].in = tensors[i].const_data_ptr();
    gathered[i].out = outputs[i].mutable_data_ptr();
  }
  GatherRowsArgs args;
  args.index = index.const_data_ptr<int32_t>();
  args.rows = index.numel();
  args.slots = slots;
  for (size_t first = 0; first < gathered.size(); first += kMaxGathered) {
    args.n_tensors = static_cast<int>(std::min<size_t>(kMaxGathered, gathered.size() - first));
    std::copy_n(gathered.begin() + static_cast<int64_t>(first), args.n_tensors, args.tensors);
    CUSEQ_RUN(gather_rows, index, args);
  }
  return outputs;
}

class GatherRows : public torch::autograd::Function<GatherRows> {
 public:
  static constexpr bool is_traceable = true;

  // Rows of tensors that need no gradient are returned outside of autograd: compiled autograd
  // accepts no output marked as not differentiable.
  static variable_list forward(AutogradContext* ctx, TensorList tensors, const Tensor& index,
                               const Tensor& inverse, c10::SymIntArrayRef rows, int64_t leading,
                               Scalars fill, std::vector<Tensor>* all) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({index, inverse});
    ctx->saved_data["leading"] = static_cast<int64_t>(rows.size());
    ctx->saved_data["tensors"] = static_cast<int64_t>(tensors.size());
    ctx->set_materialize_grads(false);
    *all = call_gather_rows(tensors, index, inverse, rows, leading, fill);
    ctx->saved_data["source_rows"] = tensors[0].sym_sizes().slice(0, leading).vec();
    std::vector<int64_t> sources;
    variable_list outputs;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].requires_grad()) continue;
      sources.push_back(static_cast<int64_t>(i));
      outputs.push_back((*all)[i]);
    }
    ctx->saved_data["sources"] = sources;
    return outputs;
  }

  // The gradient of a slot is that of the row which copied it.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const std::vector<int64_t> sources = ctx->saved_data["sources"].toIntVector();
    const int64_t leading = ctx->saved_data["leading"].toInt();
    std::vector<int64_t> wanted;
    std::vector<Tensor> defined;
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor& grad = grads[i];
      if (!grad.defined() || !ctx->needs_input_grad(sources[i])) continue;
      // Gradients may have any strides, such as the expanded zeros of sum().
      const bool fits = grad.dim() == leading || grad.sym_size(-1) <= 1 || grad.sym_stride(-1) == 1;
      wanted.push_back(sources[i]);
      defined.push_back(fits ? grad : grad.contiguous());
    }
    constexpr int64_t kOthers = 6;  // arguments after the tensors
    variable_list result(ctx->saved_data["tensors"].toInt() + kOthers);
    if (defined.empty()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::vector<Scalar> zeros(defined.size(), 0);
    const std::vector<Tensor> gathered =
        call_gather_rows(defined, /*index=*/saved[1], /*inverse=*/saved[0],
                         ctx->saved_data["source_rows"].toSymIntVector(), leading, zeros);
    for (size_t i = 0; i < wanted.size(); ++i) result[wanted[i]] = gathered[i];
    return result;
  }
};

std::vector<Tensor> gather_rows_autograd(TensorList tensors, const Tensor& index,
                                         const Tensor& inverse, c10::SymIntArrayRef rows,
                                         int64_t leading, Scalars fill) {
  refuse_forward_mode(tensors, "cuseq::gather_rows");
  if (!any_requires_grad(tensors)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_gather_rows(tensors, index, inverse, rows, leading, fill);
  }
  std::vector<Tensor> all;
  const variable_list differentiable =
      GatherRows::apply(tensors, index, inverse, rows, leading, fill, &all);
  size_t next = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (tensors[i].requires_grad()) all[i] = differentiable[next++];
  }
  return all;
}

}  // namespace

std::vector<Tensor> gather_rows(TensorList tensors, const Tensor& index, const Tensor& inverse,
                                at::IntArrayRef rows, int64_t leading, Scalars fill) {
  return call_gather_rows(tensors, index, inverse, c10::fromIntArrayRefSlow(rows), leading, fill);
}

CUSEQ_REGISTER(m) { m.impl("gather_rows", TORCH_FN(gather_rows_kernel)); }

TORCH_LIBRARY_IMPL(cuseq, Autograd, m) { m.impl("gather_rows", TORCH_FN(gather_rows_autograd)); }

}  // namespace cuseq
