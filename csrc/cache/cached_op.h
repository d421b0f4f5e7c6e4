#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "cuseq/cache.h"

namespace cuseq {

using CachedTensors = decltype(CachedValue::tensors);

// All that the cache knows of one cached op. To cache another one, add it to CachedOp and to the
// table of rows in cached_ops.cpp.
struct CachedOpRow {
  // Where bytes are short the lowest goes first.
  enum class Turn : uint8_t { kMasksAndObjects, kTokens, kOffsets };

  CachedOp op;
  const char* name;
  Turn turn;
  CachedTensors (*compute)(const CacheQuery& query);  // null where the caller makes the value
  // For values so large that room is made before they are allocated, else null.
  int64_t (*bytes)(const CacheQuery& query);
};

const CachedOpRow& row_of(CachedOp op);

}  // namespace cuseq
