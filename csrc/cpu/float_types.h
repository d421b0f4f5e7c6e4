#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "ops/float_type.h"

// Dispatch over the dtypes of floating-point data.
namespace cuseq::cpu {

// The type that a kernel computes in.
template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Call run.template operator()<T>() for the dtype.
template <typename Run>
void dispatch_float(FloatType type, const Run& run) {
  switch (type) {
    case FloatType::kFloat32:
      return run.template operator()<float>();
    case FloatType::kFloat64:
      return run.template operator()<double>();
    case FloatType::kBFloat16:
      return run.template operator()<c10::BFloat16>();
    case FloatType::kFloat16:
      return run.template operator()<c10::Half>();
  }
}

}  // namespace cuseq::cpu
