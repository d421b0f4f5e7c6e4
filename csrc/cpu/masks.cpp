#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "ops/masks.h"

namespace cuseq::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;

template <typename T>
void fill(const DenseMaskArgs& args) {
  const auto seen = static_cast<T>(args.seen);
  const auto hidden = static_cast<T>(args.hidden);
  auto* out = static_cast<T*>(args.out);
  const int64_t grain = std::max<int64_t>(1, kGrain / args.stride);
  at::parallel_for(0, args.rows * args.queries, grain, [&](int64_t begin, int64_t stop) {
    for (int64_t index = begin; index < stop; ++index) {
      const int64_t row = index / args.queries;
      const int64_t token = args.query_begin + row * args.row_step + index % args.queries;
      const int64_t key_begin = args.key_begin + row * args.row_step;
      const KeyRange keys = args.rule.keys_of(token, args.rule.segments.seqlens.segment_of(token));
      // Wrong offsets could give bounds outside the row.
      const int64_t first = std::clamp<int64_t>(keys.first - key_begin, 0, args.keys);
      const int64_t end = std::clamp<int64_t>(keys.end - key_begin, first, args.keys);
      T* line = out + index * args.stride;
      std::fill(line, line + first, hidden);
      std::fill(line + first, line + end, seen);
      std::fill(line + end, line + args.stride, hidden);
    }
  });
}

BlockRange range_of(const BlockMaskArgs& args, int64_t row, int64_t query_block) {
  const int64_t base = row * args.row_length;
  const int64_t begin = query_block * args.query_block;
  const int64_t stop = std::min(begin + args.query_block, args.row_length);
  KeyRange any{std::numeric_limits<int64_t>::max(), 0};
  KeyRange all{0, std::numeric_limits<int64_t>::max()};
  for (int64_t query = begin; query < stop; ++query) {
    const int64_t first = std::clamp<int64_t>(args.first[base + query] - base, 0, args.row_length);
    const int64_t end = std::clamp<int64_t>(args.end[base + query] - base, 0, args.row_length);
    any = {std::min(any.first, first), std::max(any.end, end)};
    all = {std::max(all.first, first), std::min(all.end, end)};
  }
  // A query block that extends past the end of the row is never full.
  if (stop < begin + args.query_block) all.end = 0;
  return BlockRange::of(any, all, args.key_block);
}

// One list of blocks, either the partial or the full ones.
struct BlockList {
  int32_t* count;
  int32_t* indices;
  int64_t size;
  int64_t found = 0;

  void add(int64_t block) { indices[found++] = static_cast<int32_t>(block); }
  void close() {
    *count = static_cast<int32_t>(found);
    std::fill(indices + found, indices + size, 0);
  }
};

}  // namespace

void mask_ranges(const MaskRangesArgs& args) {
  at::parallel_for(0, args.total_tokens, kGrain, [&](int64_t begin, int64_t stop) {
    const SeqLens& seqlens = args.rule.segments.seqlens;
    int64_t segment = seqlens.segment_of(begin);
    for (int64_t token = begin; token < stop; ++token) {
      if (segment < seqlens.n_seqs && seqlens.begin(segment + 1) <= token) {
        segment = seqlens.segment_of(token);
      }
      const KeyRange keys = args.rule.keys_of(token, segment);
      args.first[token] = static_cast<int32_t>(keys.first);
      args.end[token] = static_cast<int32_t>(keys.end);
    }
  });
}

void dense_mask(const DenseMaskArgs& args) {
  switch (args.element_size) {
    case 1:
      return fill<uint8_t>(args);
    case 2:
      return fill<uint16_t>(args);
    case 4:
      return fill<uint32_t>(args);
    default:
      return fill<uint64_t>(args);
  }
}

void block_mask(const BlockMaskArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    std::vector<BlockRange> ranges;
    for (int64_t i = 0; i < args.query_blocks; ++i) ranges.push_back(range_of(args, row, i));
    const auto lists = [&](int32_t* const(&counts)[2], int32_t* const(&indices)[2], int64_t at,
                           int64_t size) {
      return std::array<BlockList, 2>{BlockList{counts[0] + at, indices[0] + at * size, size},
                                      BlockList{counts[1] + at, indices[1] + at * size, size}};
    };
    for (int64_t i = 0; i < args.query_blocks; ++i) {
      auto both =
          lists(args.key_counts, args.key_indices, row * args.query_blocks + i, args.key_blocks);
      for (int64_t j = 0; j < args.key_blocks; ++j) {
        if (ranges[i].sees(j)) both[ranges[i].sees_all(j)].add(j);
      }
      for (BlockList& list : both) list.close();
    }
    for (int64_t j = 0; j < args.key_blocks; ++j) {
      auto both = lists(args.query_counts, args.query_indices, row * args.key_blocks + j,
                        args.query_blocks);
      for (int64_t i = 0; i < args.query_blocks; ++i) {
        if (ranges[i].sees(j)) both[ranges[i].sees_all(j)].add(i);
      }
      for (BlockList& list : both) list.close();
    }
  }
}

}  // namespace cuseq::cpu
