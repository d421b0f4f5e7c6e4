#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/float_type.h"

// Vector loads and stores of consecutive elements, and the conversion of their types.
namespace cuseq::cuda {

template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T values[N];
};

template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<From, __half>) {
    return static_cast<To>(__half2float(value));
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

// Call run.template operator()<T>() for the dtype. `run` belongs to the side that calls this.
#pragma nv_exec_check_disable
template <typename Run>
__host__ __device__ __forceinline__ void dispatch_float(FloatType type, const Run& run) {
  switch (type) {
    case FloatType::kFloat32:
      return run.template operator()<float>();
    case FloatType::kFloat64:
      return run.template operator()<double>();
    case FloatType::kBFloat16:
      return run.template operator()<__nv_bfloat16>();
    case FloatType::kFloat16:
      return run.template operator()<__half>();
  }
}

// A vector of elements as stored in memory, kept in whole words: with separate 16-bit values the
// compiler would extract and insert each of them.
template <typename T, int V>
struct Packed {
  using Word = std::conditional_t<sizeof(T) * V % 4 == 0, uint32_t, uint16_t>;
  static constexpr int kWords = sizeof(T) * V / sizeof(Word);
  Vec<Word, kWords> words = {};

  template <typename A>
  __device__ __forceinline__ void get(A (&out)[V]) const {
    if constexpr (sizeof(T) == 2 && V > 1) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        const float2 two = unpack(words.values[i]);
        out[2 * i] = two.x;
        out[2 * i + 1] = two.y;
      }
    } else {
      T values[V];
      memcpy(values, &words, sizeof(words));
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = convert<A>(values[i]);
    }
  }

  template <typename A>
  __device__ __forceinline__ void set(const A (&in)[V]) {
    if constexpr (sizeof(T) == 2 && V > 1) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) words.values[i] = pack(in[2 * i], in[2 * i + 1]);
    } else {
      T values[V];
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = convert<T>(in[i]);
      memcpy(&words, values, sizeof(words));
    }
  }

 private:
  __device__ __forceinline__ static float2 unpack(uint32_t word) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    } else {
      __half2 two;
      memcpy(&two, &word, sizeof(word));
      return __half22float2(two);
    }
  }

  __device__ __forceinline__ static uint32_t pack(float a, float b) {
    uint32_t word;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
      memcpy(&word, &two, sizeof(word));
    } else {
      const __half2 two = __floats2half2_rn(a, b);
      memcpy(&word, &two, sizeof(word));
    }
    return word;
  }
};

// Store a vector that no kernel reads soon, so that it leaves the L2 cache before other data.
template <typename T, int V>
__device__ __forceinline__ void store_streaming(Packed<T, V>* to, const Packed<T, V>& packed) {
  constexpr size_t kBytes = sizeof(packed);
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  using Small = std::conditional_t<kBytes == 2, unsigned short, unsigned int>;
  using Large = std::conditional_t<kBytes == 8, uint2, uint4>;
  using Raw = std::conditional_t<(kBytes <= 4), Small, Large>;
  Raw raw;
  memcpy(&raw, &packed, kBytes);
  __stcs(reinterpret_cast<Raw*>(to), raw);
}

// Load N consecutive elements, aligned to their total size or to 16 bytes if that is less.
template <int N, typename Source, typename A>
__device__ __forceinline__ void load_vector(const Source* source, A* out) {
  constexpr int kChunk = N * sizeof(Source) <= 16 ? N : static_cast<int>(16 / sizeof(Source));
#pragma unroll
  for (int i = 0; i < N; i += kChunk) {
    const auto packed = *reinterpret_cast<const Packed<Source, kChunk>*>(source + i);
    A chunk[kChunk];
    packed.get(chunk);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) out[i + j] = chunk[j];
  }
}

}  // namespace cuseq::cuda
