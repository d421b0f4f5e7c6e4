#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

struct Image {
  int64_t frames, height, width;

  int64_t patches() const { return frames * height * width; }
};

std::vector<Image> images_of(const Tensor& grids, int64_t merge) {
  check_memory(grids, "grid_thw");
  TORCH_CHECK_VALUE(grids.is_cpu() && grids.scalar_type() == at::kLong && grids.is_contiguous() &&
                        grids.dim() == 2 && grids.size(1) == 3,
                    "grid_thw must be contiguous int64 [n, 3] on the CPU, got ",
                    dtype_name(grids.scalar_type()), " ", grids.sizes(), " on ", grids.device());
  const auto* size = grids.const_data_ptr<int64_t>();
  std::vector<Image> images;
  int64_t left = INT32_MAX;
  for (int64_t i = 0; i < grids.size(0); ++i, size += 3) {
    const Image image{size[0], size[1], size[2]};
    TORCH_CHECK_VALUE(image.frames >= 1 && image.height >= 1 && image.width >= 1,
                      "grid_thw must have sizes of at least 1, got (", size[0], ", ", size[1], ", ",
                      size[2], ") in row ", i);
    TORCH_CHECK_VALUE(image.height % merge == 0 && image.width % merge == 0,
                      "grid_thw must have heights and widths that are multiples of merge_size = ",
                      merge, ", got (", size[0], ", ", size[1], ", ", size[2], ") in row ", i);
    TORCH_CHECK_VALUE(image.frames <= left && image.height <= left / image.frames &&
                          image.width <= left / (image.frames * image.height),
                      "grid_thw must have at most 2^31 - 1 patches together, got more from row ", i,
                      " on");
    left -= image.patches();
    images.push_back(image);
  }
  return images;
}

// Write the row and the column of each patch of a frame. The patches of a token follow one another.
int64_t* write_places(const Image& image, int64_t merge, int64_t* out) {
  for (int64_t top = 0; top < image.height; top += merge) {
    for (int64_t left = 0; left < image.width; left += merge) {
      for (int64_t patch = 0; patch < merge * merge; ++patch) {
        *out++ = top + patch / merge;
        *out++ = left + patch % merge;
      }
    }
  }
  return out;
}

// Write the tokens of a frame window by window, from token `first` on; append the windows' lengths.
int64_t* write_windows(const Image& image, int64_t merge, int64_t window, int64_t first,
                       int64_t* out, std::vector<int64_t>& lengths) {
  const int64_t rows = image.height / merge, columns = image.width / merge;
  for (int64_t top = 0; top < rows; top += window) {
    const int64_t bottom = std::min(rows, top + window);
    for (int64_t left = 0; left < columns; left += window) {
      const int64_t right = std::min(columns, left + window);
      for (int64_t row = top; row < bottom; ++row) {
        for (int64_t column = left; column < right; ++column) {
          *out++ = first + row * columns + column;
        }
      }
      lengths.push_back((bottom - top) * (right - left) * merge * merge);
    }
  }
  return out;
}

}  // namespace

VisionRows vision_rows(const Tensor& grids, int64_t merge, int64_t window, bool frames_apart) {
  TORCH_CHECK_VALUE(1 <= merge && merge <= 1024, "merge_size must be 1 to 1024, got ", merge);
  TORCH_CHECK_VALUE(window >= 0, "window must be at least 1 token, got ", window);
  const std::vector<Image> images = images_of(grids, merge);
  int64_t patches = 0;
  for (const Image& image : images) patches += image.patches();
  const auto options = at::TensorOptions().dtype(at::kLong);
  VisionRows rows;
  rows.places = at::empty({patches, 2}, options);
  rows.window_index = at::empty({window > 0 ? patches / (merge * merge) : 0}, options);
  std::vector<int64_t> lengths, windows;
  auto* place = rows.places.mutable_data_ptr<int64_t>();
  auto* index = rows.window_index.mutable_data_ptr<int64_t>();
  int64_t first = 0;
  for (const Image& image : images) {
    const int64_t frame = image.height * image.width;
    lengths.insert(lengths.end(), frames_apart ? image.frames : 1,
                   frames_apart ? frame : image.patches());
    const auto* begin = place;
    place = write_places(image, merge, place);
    for (int64_t i = 1; i < image.frames; ++i) place = std::copy_n(begin, 2 * frame, place);
    for (int64_t i = 0; window > 0 && i < image.frames; ++i) {
      index = write_windows(image, merge, window, first, index, windows);
      first += frame / (merge * merge);
    }
  }
  rows.lengths = tensor_of(std::move(lengths));
  rows.window_lengths = tensor_of(std::move(windows));
  return rows;
}

}  // namespace cuseq
