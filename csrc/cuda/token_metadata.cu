#include "cuda/launch.cuh"
#include "ops/token_metadata.h"

namespace cuseq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;

// One thread handles four consecutive tokens, with one vector store per output if all four exist.
__global__ void __launch_bounds__(kThreads) token_metadata_kernel(const TokenMetadataArgs args) {
  const SeqLens& seqlens = args.segments.seqlens;
  const int64_t block_first = static_cast<int64_t>(blockIdx.x) * kThreads * kItems;
  const int64_t block_end = block_first + kThreads * kItems;
  const int64_t last_token =
      (block_end < args.segments.total_tokens ? block_end : args.segments.total_tokens) - 1;
  const BlockSegments segments = BlockSegments::of(seqlens, block_first, last_token);

  const int64_t first = block_first + threadIdx.x * kItems;
  if (first >= args.segments.total_tokens) return;
  int32_t position[kItems];
  int32_t segment[kItems];
  bool is_pad[kItems];
  int64_t low = segments.low;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    low = seqlens.segment_of(first + k, low, segments.high);
    segment[k] = static_cast<int32_t>(low);
    position[k] = static_cast<int32_t>(first + k - seqlens.begin(low));
    is_pad[k] = !args.segments.is_real(first + k, low);
  }
  if (first + kItems <= args.segments.total_tokens) {
    if (args.position_ids != nullptr) {
      *reinterpret_cast<int4*>(args.position_ids + first) =
          make_int4(position[0], position[1], position[2], position[3]);
    }
    if (args.seq_ids != nullptr) {
      *reinterpret_cast<int4*>(args.seq_ids + first) =
          make_int4(segment[0], segment[1], segment[2], segment[3]);
    }
    if (args.is_pad != nullptr) {
      *reinterpret_cast<uchar4*>(args.is_pad + first) =
          make_uchar4(is_pad[0], is_pad[1], is_pad[2], is_pad[3]);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (first + k >= args.segments.total_tokens) break;
    if (args.position_ids != nullptr) args.position_ids[first + k] = position[k];
    if (args.seq_ids != nullptr) args.seq_ids[first + k] = segment[k];
    if (args.is_pad != nullptr) args.is_pad[first + k] = is_pad[k];
  }
}

}  // namespace

void token_metadata(const TokenMetadataArgs& args, Stream stream) {
  if (args.segments.total_tokens == 0) return;
  const auto blocks =
      static_cast<unsigned>(ceil_div(args.segments.total_tokens, kThreads * kItems));
  token_metadata_kernel<<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace cuseq::cuda
