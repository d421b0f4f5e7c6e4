#include "attention/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <string>
#include <utility>

#include "ops/checks.h"

namespace cuseq::attention {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> group_named(const std::string& name) {
  TORCH_CHECK_VALUE(!name.empty(),
                    "packed is a rank's part of a row and needs a process group, got none: call "
                    "torch.distributed.init_process_group first, or give cp_partition a group");
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "packed must name a process group of this process, got \"", name,
                      "\", which is not known: it was destroyed, or made under another name. Give "
                      "cp_partition or ContextParallel the group of this run");
  }
}

// torch 2.13 renamed two of ProcessGroup's functions and deprecates the old names. These are
// templates, so that only the name which the group has is compiled.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> all_gather(ProcessGroup& group, Tensor& to, Tensor& from) {
  if constexpr (requires { group.all_gather_single(to, from); }) {
    return group.all_gather_single(to, from);
  } else {
    return group._allgather_base(to, from);
  }
}

template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> all_to_all(ProcessGroup& group, Tensor& to, Tensor& from,
                                          std::vector<int64_t>& received,
                                          std::vector<int64_t>& sent) {
  if constexpr (requires { group.all_to_all_single(to, from, received, sent); }) {
    return group.all_to_all_single(to, from, received, sent);
  } else {
    return group.alltoall_base(to, from, received, sent);
  }
}

using RankFacts = std::vector<int64_t>;

// Return the ranks whose facts are not those of most ranks, or of rank 0 if there is no majority.
std::vector<int64_t> odd_ranks(const std::vector<RankFacts>& all) {
  std::map<RankFacts, int64_t> count;
  for (const RankFacts& facts : all) ++count[facts];
  const RankFacts* usual = &all.front();
  for (const auto& [facts, ranks] : count) {
    if (ranks > count[*usual]) usual = &facts;
  }
  std::vector<int64_t> odd;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != *usual) odd.push_back(static_cast<int64_t>(rank));
  }
  return odd;
}

std::vector<RankFacts> only(const std::vector<RankFacts>& all, size_t begin, size_t end) {
  std::vector<RankFacts> found;
  for (const RankFacts& facts : all) found.emplace_back(facts.begin() + begin, facts.begin() + end);
  return found;
}

}  // namespace

Arrival::Arrival() = default;
Arrival::Arrival(c10::intrusive_ptr<c10d::Work> work, Tensor sent)
    : work_(std::move(work)), sent_(std::move(sent)) {}
Arrival::Arrival(Arrival&&) noexcept = default;
Arrival& Arrival::operator=(Arrival&&) noexcept = default;
Arrival::~Arrival() = default;

void Arrival::wait() {
  if (!work_) return;
  work_->wait();
  work_.reset();
  sent_.reset();
}

Group::Group(const RankShare& share, const Tensor& like, const Agreement& agreement)
    : group_(group_named(share.group())) {
  TORCH_CHECK_VALUE(share.at(RankMetaSlot::kCpSize) == group_->getSize() &&
                        share.at(RankMetaSlot::kRank) == group_->getRank(),
                    "packed must be the part of this rank of its process group, rank ",
                    group_->getRank(), " of ", group_->getSize(), ", got the part of rank ",
                    share.at(RankMetaSlot::kRank), " of ", share.at(RankMetaSlot::kCpSize),
                    ": give cp_partition the group that the plan was made for");
  if (device_checks_enabled() && !is_capturing(like)) check_alike(share, like, agreement);
}

Group::~Group() = default;

void Group::check_alike(const RankShare& share, const Tensor& like,
                        const Agreement& agreement) const {
  const RankFacts own = {share.at(RankMetaSlot::kHashLow),
                         share.at(RankMetaSlot::kHashHigh),
                         agreement.is_backward ? 1 : 0,
                         agreement.heads,
                         agreement.key_heads,
                         agreement.row_bytes};
  constexpr size_t kHashes = 2;
  const auto count = static_cast<int64_t>(own.size());
  const int64_t ranks = share.at(RankMetaSlot::kCpSize);
  Tensor from = at::tensor(own, at::kLong).to(like.device());
  Tensor to = at::empty({ranks * count}, from.options());
  all_gather(*group_, to, from)->wait();
  const Tensor host = to.cpu();
  std::vector<RankFacts> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto* begin = host.const_data_ptr<int64_t>() + rank * count;
    all.emplace_back(begin, begin + count);
  }
  const auto other_plans = odd_ranks(only(all, 0, kHashes));
  TORCH_CHECK_VALUE(other_plans.empty(), "all ranks must have parts of the same plan, got another ",
                    "plan on rank ", c10::Join(", ", other_plans),
                    ": ranks of a group must read the same examples in the same order");
  const auto other_calls = odd_ranks(only(all, kHashes, own.size()));
  TORCH_CHECK_VALUE(other_calls.empty(), "all ranks must call varlen_attention alike, got other ",
                    "heads, head_dim or dtype, or a backward instead of a forward, on rank ",
                    c10::Join(", ", other_calls));
}

Arrival Group::exchange(const Tensor& to, const Tensor& from, std::vector<int64_t> received,
                        std::vector<int64_t> sent) const {
  Tensor output = to;
  Tensor input = from;
  return {all_to_all(*group_, output, input, received, sent), from};
}

}  // namespace cuseq::attention
