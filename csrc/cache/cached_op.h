#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "cuseq/cache.h"

namespace cuseq {

using CachedTensors = decltype(CachedValue::tensors);

// The description of one cached op. To add a cached op, add it to CachedOp and to the table of rows
// in cached_ops.cpp.
struct CachedOpRow {
  // Order of eviction when bytes run out, lowest first.
  enum class Turn : uint8_t { kMasksAndObjects, kTokens, kOffsets };

  CachedOp op;
  const char* name;
  Turn turn;
  CachedTensors (*compute)(const CacheQuery& query);  // null if the caller makes the value
  // Size of a value so large that room must be made before it is allocated; else null.
  int64_t (*bytes)(const CacheQuery& query);
};

const CachedOpRow& row_of(CachedOp op);

}  // namespace cuseq
