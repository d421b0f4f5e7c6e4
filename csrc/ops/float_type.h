#pragma once

#include <cstdint>

namespace cuseq {

// The dtypes of floating-point data that kernels read and write.
enum class FloatType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

}  // namespace cuseq
