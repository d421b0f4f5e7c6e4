#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "planning/checks.h"
#include "planning/planning.h"

namespace cuseq {
namespace {

void check_host(const Tensor& tensor, const char* name, at::ScalarType type, int64_t columns) {
  check_memory(tensor, name);
  const bool fits =
      columns == 0 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == columns;
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.scalar_type() == type && tensor.is_contiguous() && fits, name,
      " must be contiguous ", dtype_name(type), columns == 0 ? " [n]" : " [n, 3]",
      " on the CPU, got ", dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " on ",
      tensor.device());
}

enum class TokenType : int8_t { kText = 0, kImage = 1, kVideo = 2 };

// The grids of one kind, taken one after the other as the row's tokens need them.
class Grids {
 public:
  Grids(const Tensor& grids, const char* name) : name_(name), grids_(grids) {
    check_host(grids, name, at::kLong, 3);
    const auto* values = grids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < grids.numel(); ++i) {
      TORCH_CHECK_VALUE(0 < values[i] && values[i] <= INT32_MAX, name,
                        " must have sizes of 1 to 2^31 - 1, got ", values[i], " in row ", i / 3);
    }
  }

  bool has_more() const { return next_ < grids_.size(0); }
  int64_t count() const { return grids_.size(0); }
  int64_t number() const { return next_; }
  const char* name() const { return name_; }
  const int64_t* current() const { return grids_.const_data_ptr<int64_t>() + 3 * next_; }

  // Raise if a document ended between the frames of a video.
  void check_whole() const {
    TORCH_CHECK_VALUE(frame_ == 0, "input_ids must hold the ", current()[0], " frames of ", name_,
                      "[", next_, "] in one document, got ", frame_,
                      ": was a document cut inside a video?");
  }

  // Go on to the next grid, or with `frames_apart` to the next frame of this one.
  void advance(bool frames_apart) {
    frame_ = frames_apart && frame_ + 1 < current()[0] ? frame_ + 1 : 0;
    if (frame_ == 0) ++next_;
  }

 private:
  const char* name_;
  const Tensor& grids_;
  int64_t next_ = 0, frame_ = 0;
};

struct Planes {
  int64_t *text, *time, *height, *width;

  void set_all(int64_t token, int64_t position) const {
    time[token] = height[token] = width[token] = position;
  }
};

// Write the three planes of one document's tokens [begin, end).
class Document {
 public:
  Document(const Tensor& types, const MropeRule& rule, const Tensor& intervals, const Planes& out)
      : types_(types.const_data_ptr<int8_t>()), rule_(rule), intervals_(intervals), out_(out) {}

  void write(int64_t begin, int64_t end, Grids& images, Grids& videos) const {
    int64_t position = 0;
    for (int64_t token = begin; token < end;) {
      const auto type = static_cast<TokenType>(types_[token]);
      if (type == TokenType::kText) {
        out_.set_all(token++, position++);
        continue;
      }
      const bool is_video = type == TokenType::kVideo;
      Grids& grids = is_video ? videos : images;
      TORCH_CHECK_VALUE(grids.has_more(), grids.name(), " must have a row for each that input_ids ",
                        "hold, got ", grids.count(), " and one more at token ", token);
      token = write_block(token, end, is_video, grids, position);
      grids.advance(is_video && rule_.frames_apart);
    }
    videos.check_whole();
  }

 private:
  // Write the tokens of one image, video or frame; return the token after them.
  int64_t write_block(int64_t token, int64_t end, bool is_video, const Grids& grids,
                      int64_t& position) const {
    const auto* grid = grids.current();
    const int64_t merge = rule_.spatial_merge;
    const int64_t temporal = is_video ? rule_.temporal_merge : 1;
    const int64_t frames = is_video && rule_.frames_apart ? 1 : grid[0];
    TORCH_CHECK_VALUE(frames % temporal == 0 && grid[1] % merge == 0 && grid[2] % merge == 0,
                      grids.name(), " must have multiples of the merge sizes (", temporal, ", ",
                      merge, ", ", merge, "), got (", grid[0], ", ", grid[1], ", ", grid[2],
                      ") in row ", grids.number());
    const int64_t steps = frames / temporal, rows = grid[1] / merge, columns = grid[2] / merge;
    const int64_t left = end - token;
    const bool fits = steps <= left && rows <= left && columns <= left && rows * columns <= left &&
                      steps * (rows * columns) <= left;
    const int8_t type = types_[token];
    int64_t found = 0;
    while (found < left && types_[token + found] == type) ++found;
    TORCH_CHECK_VALUE(fits && steps * rows * columns <= found, "input_ids must hold the ", steps,
                      " x ", rows, " x ", columns, " tokens of ", grids.name(), "[", grids.number(),
                      "] in one piece of a document, got ", found, " from token ", token,
                      ": was a document cut inside an image?");
    const float interval = is_video && intervals_.numel() > 0
                               ? intervals_.const_data_ptr<float>()[grids.number()]
                               : 1.0F;
    for (int64_t step = 0; step < steps; ++step) {
      const auto time = static_cast<int64_t>(static_cast<float>(step) * interval);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column, ++token) {
          out_.time[token] = position + time;
          out_.height[token] = position + row;
          out_.width[token] = position + column;
        }
      }
    }
    position += std::max(rows, columns);
    return token;
  }

  const int8_t* types_;
  const MropeRule& rule_;
  const Tensor& intervals_;
  const Planes& out_;
};

void check_intervals(const Tensor& intervals, const Grids& videos) {
  check_host(intervals, "second_per_grid_ts", at::kFloat, 0);
  TORCH_CHECK_VALUE(intervals.numel() == 0 || intervals.numel() == videos.count(),
                    "second_per_grid_ts must have one value for each of ", videos.count(),
                    " videos, got ", intervals.numel());
  const auto* values = intervals.const_data_ptr<float>();
  for (int64_t i = 0; i < intervals.numel(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(values[i]) && 0 <= values[i] && values[i] <= 1e6,
                      "second_per_grid_ts must give 0 to 10^6 positions, got ", values[i],
                      " positions between the frames of video ", i);
  }
}

}  // namespace

Tensor mrope_positions(const Tensor& types, const Tensor& lengths, const Tensor& segments,
                       const Tensor& image_grids, const Tensor& video_grids,
                       const Tensor& intervals, const MropeRule& rule) {
  check_host(types, "mm_token_type_ids", at::kChar, 0);
  check_host(lengths, "lengths", at::kLong, 0);
  check_host(segments, "segments", at::kLong, 0);
  TORCH_CHECK_VALUE(lengths.numel() == segments.numel(),
                    "segments must have one value for each of ", lengths.numel(), " lengths, got ",
                    segments.numel());
  TORCH_CHECK_VALUE(rule.spatial_merge >= 1 && rule.temporal_merge >= 1,
                    "the merge sizes must be at least 1, got ", rule.spatial_merge, " and ",
                    rule.temporal_merge);
  Grids images(image_grids, "image_grid_thw"), videos(video_grids, "video_grid_thw");
  check_intervals(intervals, videos);
  const int64_t total = types.numel();
  const auto* type = types.const_data_ptr<int8_t>();
  for (int64_t i = 0; i < total; ++i) {
    TORCH_CHECK_VALUE(0 <= type[i] && type[i] <= 2,
                      "mm_token_type_ids must be 0 (text), 1 (image) ", "or 2 (video), got ",
                      static_cast<int>(type[i]), " at token ", i);
  }

  Tensor out = at::empty({4, 1, total}, at::TensorOptions().dtype(at::kLong));
  auto* data = out.mutable_data_ptr<int64_t>();
  const Planes planes{data, data + total, data + 2 * total, data + 3 * total};
  const Document document(types, rule, intervals, planes);
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* segment = segments.const_data_ptr<int64_t>();
  const auto write_text = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) planes.text[token] = token - begin;
  };
  const auto write_pads = [&](int64_t from, int64_t end) {
    for (int64_t token = from; token < end; ++token) planes.set_all(token, planes.text[token]);
  };
  int64_t begin = 0;
  for (int64_t i = 0; i < lengths.numel(); ++i) {
    TORCH_CHECK_VALUE(0 <= length[i] && length[i] <= segment[i] && segment[i] <= total - begin,
                      "lengths must lie in their segments and these in the ", total,
                      " tokens, got ", length[i], " of ", segment[i], " for document ", i);
    write_text(begin, begin + segment[i]);
    document.write(begin, begin + length[i], images, videos);
    write_pads(begin + length[i], begin + segment[i]);
    begin += segment[i];
  }
  write_text(begin, total);
  write_pads(begin, total);
  for (const Grids* grids : {&images, &videos}) {
    TORCH_CHECK_VALUE(!grids->has_more(), grids->name(),
                      " must have a row for each that input_ids ", "hold, got ", grids->count(),
                      " and tokens of ", grids->number());
  }
  return out;
}

}  // namespace cuseq
