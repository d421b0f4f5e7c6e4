#pragma once

#include <cstdint>
#include <vector>

// Plans: which piece of which sample lies in which row. Nothing here knows torch.
namespace cuseq::packing {

enum class Strategy { kBestFit, kFirstFit, kSequential, kWrapped };

// What becomes of samples longer than a row; kWrapped cuts them whatever this says.
enum class Overlong { kSplit, kTruncate };

// Row b is the pieces [offsets[b], offsets[b + 1]); a piece is the tokens [start, start + length)
// of the sample with its index.
struct Plan {
  std::vector<int64_t> indices;
  std::vector<int64_t> offsets;
  std::vector<int64_t> starts;
  std::vector<int64_t> lengths;
};

// Lengths must not be negative, capacity at least 1, and the pieces fewer than 2^31.
template <typename Length>
Plan bin_pack(const Length* lengths, int64_t n, int64_t capacity, Strategy strategy,
              Overlong overlong);

}  // namespace cuseq::packing
