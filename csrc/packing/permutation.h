#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

// A pseudo-random order of [0, n) that needs no memory. This code does not depend on torch.
namespace cuseq::packing {

// The finaliser of splitmix64: every bit of the input affects every bit of the output.
inline uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A Feistel network over pairs (left, right) in a grid of at least n cells, just large enough. Each
// round shifts one half by a keyed hash of the other half, which is a bijection of the grid for any
// hash. A result of n or more is permuted again until it is below n.
class Permutation {
 public:
  Permutation(int64_t n, uint64_t seed) : n_(n) {
    const auto size = static_cast<uint64_t>(n);
    const double side = std::ceil(std::sqrt(static_cast<double>(n)));
    left_size_ = std::max<uint64_t>(1, static_cast<uint64_t>(side));
    right_size_ = std::max<uint64_t>(1, (size + left_size_ - 1) / left_size_);
    for (uint64_t& key : keys_) key = mix_bits(seed += 0x9e3779b97f4a7c15);
  }

  // Return entry i of the order; i must be in [0, n).
  int64_t operator()(int64_t i) const {
    do {
      i = once(static_cast<uint64_t>(i));
    } while (i >= n_);
    return i;
  }

 private:
  static constexpr int kRounds = 8;

  int64_t once(uint64_t i) const {
    uint64_t left = i / right_size_;
    uint64_t right = i % right_size_;
    for (int round = 0; round < kRounds; round += 2) {
      left = moved(left, left_size_, mix_bits(right ^ keys_[round]));
      right = moved(right, right_size_, mix_bits(left ^ keys_[round + 1]));
    }
    return static_cast<int64_t>(left * right_size_ + right);
  }

  static uint64_t moved(uint64_t value, uint64_t size, uint64_t hash) {
    value += (hash >> 32) * size >> 32;
    return value < size ? value : value - size;
  }

  int64_t n_;
  uint64_t left_size_;
  uint64_t right_size_;
  uint64_t keys_[kRounds];
};

}  // namespace cuseq::packing
