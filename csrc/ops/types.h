#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>

// Short names for types in the ops' signatures.
namespace cuseq {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;
using OptionalSymInt = std::optional<c10::SymInt>;
using OptionalDouble = std::optional<double>;

}  // namespace cuseq
