#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/float_types.h"

#ifndef CUSEQ_CAPABILITY
#define CUSEQ_CAPABILITY baseline
#endif

// Vector loads and stores of consecutive elements, and the conversion of their types, for files
// that are compiled once for each instruction set.
namespace cuseq::cpu::CUSEQ_CAPABILITY {

using at::vec::Vectorized;

template <typename A>
constexpr int64_t kPair = 2 * Vectorized<A>::size();  // elements in two vectors

template <typename A, typename T>
std::pair<Vectorized<A>, Vectorized<A>> load(const T* from, int64_t count) {
  if constexpr (sizeof(T) == 2) {
    const auto packed =
        count >= kPair<A> ? Vectorized<T>::loadu(from) : Vectorized<T>::loadu(from, count);
    const auto [low, high] = at::vec::convert_to_float<T>(packed);
    return {low, high};
  } else {
    constexpr int64_t kSize = Vectorized<A>::size();
    if (count >= 2 * kSize) {
      return {Vectorized<A>::loadu(from), Vectorized<A>::loadu(from + kSize)};
    }
    const int64_t rest = std::max<int64_t>(0, count - kSize);
    return {Vectorized<A>::loadu(from, std::min(count, kSize)),
            rest > 0 ? Vectorized<A>::loadu(from + kSize, rest) : Vectorized<A>(0)};
  }
}

template <typename A, typename T>
void store(T* to, Vectorized<A> low, Vectorized<A> high, int64_t count) {
  if constexpr (sizeof(T) == 2) {
    const auto packed = at::vec::convert_from_float<T>(low, high);
    count >= kPair<A> ? packed.store(to) : packed.store(to, static_cast<int>(count));
  } else {
    constexpr int64_t kSize = Vectorized<A>::size();
    if (count >= 2 * kSize) {
      low.store(to);
      high.store(to + kSize);
      return;
    }
    low.store(to, static_cast<int>(std::min(count, kSize)));
    if (count > kSize) high.store(to + kSize, static_cast<int>(count - kSize));
  }
}

}  // namespace cuseq::cpu::CUSEQ_CAPABILITY
