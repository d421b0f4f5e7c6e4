#pragma once

#include <cstdint>
#include <vector>

// Packing plans: which piece of which sample lies in which row. This code does not depend on torch.
namespace cuseq::packing {

enum class Strategy { kBestFit, kFirstFit, kSequential, kWrapped };

// Treatment of samples longer than a row; kWrapped always cuts them.
enum class Overlong { kSplit, kTruncate };

// Row b is the pieces [offsets[b], offsets[b + 1]); a piece is the tokens [start, start + length)
// of the sample with its index.
struct Plan {
  std::vector<int64_t> indices;
  std::vector<int64_t> offsets;
  std::vector<int64_t> starts;
  std::vector<int64_t> lengths;
};

// Pack samples into rows. Lengths must not be negative, the capacity must be at least 1, and there
// must be fewer than 2^31 pieces.
template <typename Length>
Plan bin_pack(const Length* lengths, int64_t n, int64_t capacity, Strategy strategy,
              Overlong overlong);

}  // namespace cuseq::packing
