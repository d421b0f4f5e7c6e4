#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "attention/rank_share.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

// The exchange of rows between the ranks of a process group. Over NCCL no function waits on the
// host.
namespace cuseq::attention {

// Rows on their way. They may be read after wait().
class Arrival {
 public:
  Arrival();
  Arrival(c10::intrusive_ptr<c10d::Work> work, Tensor sent);
  Arrival(Arrival&&) noexcept;
  Arrival& operator=(Arrival&&) noexcept;
  ~Arrival();

  // Let the current stream wait; over gloo, the host. Raise RuntimeError if a rank failed.
  void wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  Tensor sent_;  // kept until the rows have left
};

// Facts of a call that must be the same on every rank of an exchange.
struct Agreement {
  bool is_backward = false;
  int64_t heads = 0;
  int64_t key_heads = 0;
  int64_t row_bytes = 0;  // of the keys and values of a token
};

class Group {
 public:
  // Look up the share's group. Raise ValueError if there is none or if it has other ranks than the
  // plan. With CUSEQ_CHECK=1 ranks compare plans and `agreement`, and raise on all of them if they
  // differ.
  Group(const RankShare& share, const Tensor& like, const Agreement& agreement);
  ~Group();

  // Send the rows [n, ...] of `from`, `sent[i]` of them to rank i, and receive those of `to`.
  // Both must be contiguous.
  Arrival exchange(const Tensor& to, const Tensor& from, std::vector<int64_t> received,
                   std::vector<int64_t> sent) const;

 private:
  void check_alike(const RankShare& share, const Tensor& like, const Agreement& agreement) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace cuseq::attention
