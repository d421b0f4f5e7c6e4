#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "attention/backend.h"
#include "attention/flash_rows.h"
#include "attention/measured.h"
#include "attention/packages.h"
#include "attention/rows.h"
#include "ops/dispatch.h"

// FlashAttention 4 and 3. Their packages launch the kernels from Python: cuseq.attention.fa4 and
// cuseq.attention.fa3 register them for the ops cuseq::fa4_forward, fa4_backward, fa3_forward and
// fa3_backward, which this file calls. Unlike torch's activate_flash_attention_impl, this changes
// no other attention of the process.
namespace cuseq::attention {
namespace {

// The ops return why they refuse the call, or nothing. The last argument says that the call must
// run: then they raise the package's own error.
template <typename... Tensors>
using Signature = std::string(Tensors..., const Tensor&, const Tensor&, int64_t, int64_t, double,
                              bool, OptionalInt, OptionalInt, bool);
using ForwardSignature =
    Signature<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&>;
using BackwardSignature =
    Signature<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
              const Tensor&, const Tensor&, const Tensor&, const Tensor&>;

struct Ops {
  c10::TypedOperatorHandle<ForwardSignature> forward;
  c10::TypedOperatorHandle<BackwardSignature> backward;

  explicit Ops(const std::string& name)
      : forward(find_op<ForwardSignature>(("cuseq::" + name + "_forward").c_str())),
        backward(find_op<BackwardSignature>(("cuseq::" + name + "_backward").c_str())) {}
};

// Whether a package can be used: set when Python loads it, and when one of its kernels fails. All
// threads read it in every call. There is no lock, so another thread may still read a text that is
// replaced, and it is not freed: outside of tests one text a package.
struct Reports {
  std::atomic<const std::string*> missing{nullptr};
  std::atomic<const std::string*> failed{nullptr};
  std::atomic<bool> takes_two_rows[2]{};  // on the CPU, where tests run stand-ins, and on CUDA

  static void set(std::atomic<const std::string*>& report, const std::string& text) {
    report.store(text.empty() ? nullptr : new std::string(text), std::memory_order_release);
  }
  static const std::string* get(const std::atomic<const std::string*>& report) {
    return report.load(std::memory_order_acquire);
  }
};

struct Fa4 {
  static constexpr const char* name = "fa4";
  static inline Reports reports;
};
struct Fa3 {
  static constexpr const char* name = "fa3";
  static inline Reports reports;
};

Reports& reports_of(const std::string& name) {
  TORCH_INTERNAL_ASSERT(name == Fa4::name || name == Fa3::name, "no package of attention: ", name);
  return name == Fa4::name ? Fa4::reports : Fa3::reports;
}

template <typename Package>
const Ops& ops() {
  static const Ops found(Package::name);
  return found;
}

// Return the head_dim that q, k and v are padded to. With others flash-attn-4 4.0.0b8 on sm_90 does
// not compile its backward, or gives wrong gradients of q (80 with a window), and with 192 it does
// not compile that of grouped queries.
int64_t package_head_dim(const Call& call) {
  const int64_t own = std::max(call.q.size(2), call.v.size(2));
  for (const int64_t size : {64, 96, 128}) {
    if (own <= size) return size;
  }
  return own <= 192 && call.q.size(1) == call.k.size(1) ? 192 : kMaxFlashHeadDim;
}

using Rows = c10::SmallVector<Tensor, 5>;

// Return tensors of a row as the kernels take them. Their compiled code has no expanded strides.
// They load whole tiles, which reach past the end of the last sequence, and multiply what they find
// there by zero: it must not be NaN. Past the end of a tensor they read zeros.
Rows package_rows(Rows rows, const Sequences& sequences, int64_t head_dim) {
  const bool knows_tail = sequences.num_real_tokens.has_value();
  for (Tensor& tensor : rows) {
    if (knows_tail) {
      const Tensor own = is_expanded(tensor) ? tensor.contiguous() : tensor;
      tensor = flash_rows(own.narrow(0, 0, *sequences.num_real_tokens), head_dim);
    } else {
      tensor = tensor.size(2) == head_dim ? tensor.clone(at::MemoryFormat::Contiguous)
                                          : pad_last_dim(tensor, head_dim).contiguous();
    }
  }
  if (!knows_tail) zero_tail(rows, sequences);
  return rows;
}

// Prepare the tensors of the queries and those of the keys; return all, in this order.
Rows package_rows(const Call& call, Rows of_queries, Rows of_keys, int64_t head_dim) {
  if (call.is_of_one_row()) {
    of_queries.append(of_keys.begin(), of_keys.end());
    return package_rows(std::move(of_queries), call.queries, head_dim);
  }
  Rows rows = package_rows(std::move(of_queries), call.queries, head_dim);
  const Rows keys = package_rows(std::move(of_keys), call.keys, head_dim);
  rows.append(keys.begin(), keys.end());
  return rows;
}

template <typename Package>
bool takes(const Call& call, std::string* why) {
  const auto key = call.q.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  if (!ops<Package>().forward.hasKernelForDispatchKey(key)) {
    if (!call.q.is_cuda()) return refuse(why, "it runs on CUDA, got a tensor on the CPU");
    if (why != nullptr) *why = why_missing(Package::name);
    return false;
  }
  // A call that names the backend raises the package's own error.
  const std::string* failed = Reports::get(Package::reports.failed);
  if (failed != nullptr && call.backend == "auto") return refuse(why, *failed);
  if (at::globalContext().deterministicAlgorithms()) {
    return refuse(why,
                  "its backward is not deterministic, which torch.use_deterministic_algorithms "
                  "asks for");
  }
  const auto& takes_two_rows = Package::reports.takes_two_rows[call.q.is_cuda()];
  if (!call.is_of_one_row() && !takes_two_rows.load(std::memory_order_acquire)) {
    return refuse(
        why,
        "its kernels for this GPU were not tried on keys of another row, where some crash "
        "on sequences without keys");
  }
  if (!flash_takes(call, why)) return false;
  const int64_t head_dim = package_head_dim(call);
  const int64_t sm = capability_of(call.q);
  const int64_t most = most_head_dim(Package::name, sm);
  if (head_dim > most) {
    return refuse(why, "on sm_", sm, " it takes head_dim up to ", most, ", got ", head_dim,
                  " after padding");
  }
  return true;
}

// Return whether a kernel refused its call; the package is passed by from then on.
template <typename Package>
bool is_refused(const std::string& refusal) {
  if (!refusal.empty()) Reports::set(Package::reports.failed, refusal);
  return !refusal.empty();
}

template <typename Package>
std::optional<Output> forward(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t head_dim = package_head_dim(call);
  const FlashWindow window(call);
  const Rows rows = package_rows(call, {call.q}, {call.k, call.v}, head_dim);
  const Tensor &q = rows[0], &k = rows[1], &v = rows[2];
  Tensor out = at::empty({call.q.size(0), call.q.size(1), head_dim}, q.options());
  Tensor logsumexp = at::empty({call.q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  const std::string refusal = ops<Package>().forward.call(
      q, k, v, out.narrow(0, 0, q.size(0)), logsumexp, call.queries.offsets, call.keys.offsets,
      call.queries.longest, call.keys.longest, call.scale, call.causal, window.left, window.right,
      call.backend != "auto");
  if (is_refused<Package>(refusal)) return std::nullopt;
  out = unpad_last_dim(out, call.v.size(2));
  if (q.size(0) < out.size(0)) {
    Tensor whole = at::empty({call.q.size(1), call.q.size(0)}, logsumexp.options());
    whole.narrow(1, 0, q.size(0)).copy_(logsumexp);
    logsumexp = whole;
  }
  zero_tail({out, logsumexp.t()}, call.queries);
  return Output{out, logsumexp};
}

template <typename Package>
std::optional<Gradients> backward(const Call& call, const Outer& outer) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t head_dim = package_head_dim(call);
  const FlashWindow window(call);
  const Rows rows = package_rows(call, {outer.grad_out.contiguous(), call.q, outer.out},
                                 {call.k, call.v}, head_dim);
  const Tensor &grad_out = rows[0], &q = rows[1], &out = rows[2], &k = rows[3], &v = rows[4];
  const auto empty_like = [&](const Tensor& rows) {
    return at::empty({rows.size(0), rows.size(1), head_dim}, rows.options());
  };
  Tensor grad_q = empty_like(call.q);
  Tensor grad_k = empty_like(call.k);
  Tensor grad_v = empty_like(call.v);
  const std::string refusal = ops<Package>().backward.call(
      grad_out, q, k, v, out, outer.logsumexp.narrow(1, 0, q.size(0)).contiguous(),
      grad_q.narrow(0, 0, q.size(0)), grad_k.narrow(0, 0, k.size(0)),
      grad_v.narrow(0, 0, k.size(0)), call.queries.offsets, call.keys.offsets, call.queries.longest,
      call.keys.longest, call.scale, call.causal, window.left, window.right,
      call.backend != "auto");
  if (is_refused<Package>(refusal)) return std::nullopt;
  return with_zero_tails(
      call, {unpad_last_dim(grad_q, call.q.size(2)), unpad_last_dim(grad_k, call.k.size(2)),
             unpad_last_dim(grad_v, call.v.size(2))});
}

// Ranked below PyTorch's flash kernels: on a GPU without measurements these were never tried.
const RegisterBackend fa4({Fa4::name, /*preference=*/90, takes<Fa4>, forward<Fa4>, backward<Fa4>});
const RegisterBackend fa3({Fa3::name, /*preference=*/80, takes<Fa3>, forward<Fa3>, backward<Fa3>});

}  // namespace

// On sm_100 and 103 flash-attn-4 takes q, k and v of up to 128 alike, of (192, 128), and from some
// release on of (256, 256) (`_validate_head_dims`, 4.0.0b8 and b36): here all three are padded
// alike.
int64_t most_head_dim(std::string_view name, int64_t sm) {
  return name == Fa4::name && sm / 10 == 10 ? 128 : kMaxFlashHeadDim;
}

void set_missing(const std::string& name, const std::string& why) {
  Reports::set(reports_of(name).missing, why);
}

std::string why_missing(const std::string& name) {
  const std::string* why = Reports::get(reports_of(name).missing);
  return why != nullptr ? *why
                        : "its kernels are launched from Python, through cuseq.varlen_attention";
}

std::string why_failed(const std::string& name) {
  if (name != Fa4::name && name != Fa3::name) return "";
  const std::string* how = Reports::get(reports_of(name).failed);
  return how != nullptr ? *how : "";
}

void set_registered(const std::string& name, bool on_cuda, bool takes_two_rows) {
  Reports& reports = reports_of(name);
  Reports::set(reports.failed, "");
  reports.takes_two_rows[on_cuda].store(takes_two_rows, std::memory_order_release);
}

}  // namespace cuseq::attention
