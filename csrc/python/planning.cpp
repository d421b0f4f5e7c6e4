#include "planning/planning.h"

#include <tuple>

#include "context_parallel/rank_meta.h"
#include "python/bindings.h"

namespace cuseq::python {
namespace {

struct RankMetaSlots {};

// Bind the slots as plain ints on a class (`_C.RankMeta.NUM_CUT`), which torch.compile reads as
// constants.
void bind_rank_meta_slots(py::module_& m) {
  py::class_<RankMetaSlots> slots(m, "RankMeta", "What each entry of a rank's meta holds.");
  const auto add = [&](const char* name, RankMetaSlot slot) {
    slots.attr(name) = static_cast<int>(slot);
  };
  add("CP_SIZE", RankMetaSlot::kCpSize);
  add("RANK", RankMetaSlot::kRank);
  add("OF_REPLAYS", RankMetaSlot::kOfReplays);
  add("ULYSSES", RankMetaSlot::kUlysses);
  add("WINDOW", RankMetaSlot::kWindow);
  add("ANY_FAR", RankMetaSlot::kAnyFar);
  add("SAVES_FAR_ROWS", RankMetaSlot::kSavesFarRows);
  add("NUM_PIECES", RankMetaSlot::kNumPieces);
  add("NUM_CUT", RankMetaSlot::kNumCut);
  add("NUM_TOKENS", RankMetaSlot::kNumTokens);
  add("NUM_CUT_TOKENS", RankMetaSlot::kNumCutTokens);
  add("LONGEST_WHOLE", RankMetaSlot::kLongestWhole);
  add("LONGEST_CUT", RankMetaSlot::kLongestCut);
  add("LONGEST_KEYS", RankMetaSlot::kLongestKeys);
  add("NUM_KEY_ROWS", RankMetaSlot::kNumKeyRows);
  add("NUM_FAR_ROWS", RankMetaSlot::kNumFarRows);
  add("NUM_SENT_ROWS", RankMetaSlot::kNumSentRows);
  add("ROW_TOKENS", RankMetaSlot::kRowTokens);
  add("HASH_LOW", RankMetaSlot::kHashLow);
  add("HASH_HIGH", RankMetaSlot::kHashHigh);
  add("PIECE_CAPACITY", RankMetaSlot::kPieceCapacity);
  add("KEY_CAPACITY", RankMetaSlot::kKeyCapacity);
  add("SEND_CAPACITY", RankMetaSlot::kSendCapacity);
  add("SOURCE_CAPACITY", RankMetaSlot::kSourceCapacity);
  add("SIZE", RankMetaSlot::kSize);
  slots.attr("TOKENS_PER_KEPT_ROW") = kTokensPerKeptRow;
}

cp::Plan plan_row(const at::Tensor& lengths, const OptionalTensor& segments, int64_t total_tokens,
                  int64_t cp_size, std::string_view policy, int64_t heads, int64_t key_heads,
                  std::optional<int64_t> window, std::optional<int64_t> max_far_rows) {
  cp::Options options;
  options.cp_size = cp_size;
  options.heads = heads;
  options.key_heads = key_heads;
  options.window = window.value_or(0);
  options.max_far_rows = max_far_rows;
  return cp_plan(lengths, segments, total_tokens, policy, options);
}

void bind_cp_plan(py::module_& m) {
  py::class_<cp::Plan>(m, "CpPlan", "Which tokens each rank of context parallelism holds.")
      .def(py::init(&plan_row), Released())
      .def("deal", &cp_deal, Released())
      .def("is_for", &cp_plan_is_for, Released())
      .def("pieces", &cp_pieces, Released())
      .def("share", &cp_share, Released())
      .def("most_room", &cp_most_room, Released())
      .def_readonly("num_whole", &cp::Plan::num_whole)
      .def_readonly("num_cut", &cp::Plan::num_cut)
      .def_readonly("hash", &cp::Plan::hash)
      .def_property_readonly("pairs", [](const cp::Plan& plan) { return plan.costs.pairs; })
      .def_property_readonly("max_pairs", [](const cp::Plan& plan) { return plan.costs.max_pairs; })
      .def_property_readonly("far_rows", [](const cp::Plan& plan) { return plan.costs.far_rows; })
      .def_property_readonly("time", [](const cp::Plan& plan) { return plan.costs.time; });
}

}  // namespace

void bind_planning(py::module_& m) {
  m.def("bin_pack", &bin_pack, Released());
  m.def("permutation", &permutation, Released());
  m.def("pack_window", &pack_window, Released());
  m.def("row_costs", &row_costs, Released());
  m.def("block_spans", &block_spans, Released());
  m.def(
      "mrope_positions",
      [](const at::Tensor& types, const at::Tensor& lengths, const at::Tensor& segments,
         const at::Tensor& image_grids, const at::Tensor& video_grids, const at::Tensor& intervals,
         int64_t spatial_merge, int64_t temporal_merge, bool frames_apart) {
        return mrope_positions(types, lengths, segments, image_grids, video_grids, intervals,
                               {spatial_merge, temporal_merge, frames_apart});
      },
      Released());
  m.def(
      "vision_rows",
      [](const at::Tensor& grids, int64_t merge, int64_t window, bool frames_apart) {
        const VisionRows rows = vision_rows(grids, merge, window, frames_apart);
        return std::tuple(rows.lengths, rows.places, rows.window_index, rows.window_lengths);
      },
      Released());
  bind_rank_meta_slots(m);
  bind_cp_plan(m);
}

}  // namespace cuseq::python
