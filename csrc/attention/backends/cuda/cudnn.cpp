#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/version.h>

#include <algorithm>
#include <limits>

#include "attention/backend.h"
#include "attention/flash_rows.h"
#include "attention/measured.h"
#include "attention/rows.h"
#include "attention/shared_plans.h"
#include "cuseq/cache.h"
#include "cuseq/seqlens.h"
#include "ops/checks.h"
#include "ops/dtype_name.h"

// cuDNN's attention, through torch's operators. torch keeps a plan for all sizes that it is given,
// the number of tokens among them, so rows are passed with the sizes of a plan that they share.
namespace cuseq::attention {
namespace {

constexpr int64_t kLeastCudnn = 92400;  // what torch's own varlen_attn takes for short sequences
constexpr bool kTorchTakesPacks = TORCH_VERSION_MAJOR > 2 ||
                                  (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15);

bool runs_on(int64_t sm) { return sm / 10 == 9 || sm / 10 == 10; }

int64_t cudnn_version() {
  static const int64_t version = [] {
    const auto& hooks = at::detail::getCUDAHooks();
    return hooks.compiledWithCuDNN() ? int64_t{hooks.versionRuntimeCuDNN()} : 0;
  }();
  return version;
}

// Heads are padded to multiples of 8, those of the values on their own.
int64_t padded_dim(int64_t head_dim) { return round_up(head_dim, 8); }

// torch's _cudnn_supports_head_dims names the sizes for sm_100. On sm_90 it names up to 128; up to
// 256 is exact there too (cuDNN 9.26).
bool takes_head_dims(int64_t dim, int64_t value_dim, int64_t sm) {
  if (sm == 90) return std::max(dim, value_dim) <= kMaxFlashHeadDim;
  return std::max(dim, value_dim) <= 128 || (dim == 192 && value_dim == 128);
}

// cuDNN's ragged offsets are int32, and count elements.
bool fits_int32(const Tensor& rows, int64_t tokens, int64_t padded) {
  const int64_t stride = std::max(rows.stride(0), rows.size(1) * padded);
  return tokens * stride <= std::numeric_limits<int32_t>::max();
}

// The backward's workspace has 8 bytes for each of the plan's sequences at full length. With four
// times as many numbers gradients were right in one trial, on 64 GiB, and wrong in another.
constexpr int64_t kMostElements = int64_t{1} << 31;

PlanSizes sizes_of(const Sequences& sequences, int64_t tokens) {
  return plan_sizes(sequences.count(), sequences.longest, tokens);
}

bool takes(const Call& call, std::string* why) {
  if (!call.q.is_cuda()) return refuse(why, "it runs on CUDA, got a tensor on the CPU");
  const int64_t sm = capability_of(call.q);
  if (!runs_on(sm) || !kTorchTakesPacks || cudnn_version() < kLeastCudnn) {
    if (why != nullptr) *why = why_no_cudnn(sm);
    return false;
  }
  if (call.backend == "auto" && !at::globalContext().userEnabledCuDNNSDP()) {
    return refuse(why, "torch.backends.cuda.enable_cudnn_sdp(False) turned it off");
  }
  if (call.backend == "auto" && is_capturing(call.q)) {
    return refuse(why,
                  "auto leaves graph captures to others: its plan there has the offsets' capacity "
                  "at the bound of the lengths, and cuDNN cannot always make it inside a capture");
  }
  if (at::globalContext().deterministicAlgorithms()) {
    return refuse(why,
                  "its backward is not deterministic, which torch.use_deterministic_algorithms "
                  "asks for");
  }
  const auto dtype = call.q.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    return refuse(why, "it takes fp16 and bf16, got ", dtype_name(dtype));
  }
  if (const char* extra = call.extra()) return refuse(why, "it has no ", extra);
  if (call.window.has_value()) return refuse(why, "it has no window");
  if (call.causal && !call.is_of_one_row()) {
    return refuse(why, "it has no causal mask over keys of another row");
  }
  const int64_t dim = padded_dim(call.q.size(2)), value_dim = padded_dim(call.v.size(2));
  if (!takes_head_dims(dim, value_dim, sm)) {
    return refuse(why, "on sm_", sm, " it takes head_dim up to ",
                  sm == 90 ? "256" : "128, or 192 with values of 128", ", got ", call.q.size(2),
                  " and ", call.v.size(2));
  }
  const PlanSizes queries = sizes_of(call.queries, call.q.size(0));
  const PlanSizes keys = sizes_of(call.keys, call.k.size(0));
  const int64_t heads = call.q.size(1);
  const int64_t sequences = std::max(queries.sequences, keys.sequences);
  const int64_t elements =
      sequences * heads * std::max(queries.longest * dim, keys.longest * std::max(dim, value_dim));
  if (elements > kMostElements) {
    return refuse(why, "its backward's workspace has room for ", sequences, " sequences of ",
                  std::max(queries.longest, keys.longest), " tokens, and with ", heads,
                  " heads of ", dim,
                  " these are more than 2^31 numbers: if only the device knows "
                  "the lengths, give them on the host");
  }
  if (!fits_int32(call.q, queries.tokens, std::max(dim, value_dim)) ||
      !fits_int32(call.k, keys.tokens, dim) || !fits_int32(call.v, keys.tokens, value_dim)) {
    return refuse(why, "it counts a row's numbers with 32 bits, and this row has more");
  }
  return true;
}

// Return the same rows with the plan's number of tokens. No kernel reads past the offsets' last:
// the number only counts in torch's look-up of the plan and in what torch allocates like the rows.
Tensor with_tokens(const Tensor& rows, int64_t tokens) {
  if (rows.size(0) == tokens) return rows;
  return at::from_blob(
      rows.mutable_data_ptr(), {tokens, rows.size(1), rows.size(2)}, rows.strides(),
      [rows](void*) {}, rows.options(), rows.device());
}

// A call as torch's operators take it.
struct Prepared {
  PlanSizes queries;
  PlanSizes keys;
  Tensor query_offsets;
  Tensor key_offsets;  // the same tensor in a call of one row
  Tensor q;
  Tensor k;
  Tensor v;

  explicit Prepared(const Call& call)
      : queries(sizes_of(call.queries, call.q.size(0))), keys(sizes_of(call.keys, call.k.size(0))) {
    // One plan has as many sequences of queries as of keys.
    queries.sequences = keys.sequences = std::max(queries.sequences, keys.sequences);
    query_offsets = offsets(call.queries, queries.sequences);
    key_offsets = call.is_of_one_row() ? query_offsets : offsets(call.keys, keys.sequences);
    q = rows(call.q, queries.tokens);
    k = rows(call.k, keys.tokens);
    v = rows(call.v, keys.tokens);
  }

  // Return rows padded to the plan's head_dim and tokens. Their strides count in the look-up: with
  // heads before tokens these follow the number of tokens, so such rows are copied.
  static Tensor rows(const Tensor& own, int64_t tokens) {
    const bool is_by_heads = own.size(1) > 1 && own.stride(1) > own.stride(0);
    const Tensor dense = is_expanded(own) || is_by_heads ? own.contiguous() : own;
    return with_tokens(flash_rows(dense, padded_dim(own.size(2))), tokens);
  }

  static Tensor offsets(const Sequences& sequences, int64_t room) {
    const auto* own = sequences.offsets.const_data_ptr<int32_t>();
    const auto* of_key = sequences.cu_seqlens.const_data_ptr<int32_t>();
    const bool is_view = sequences.cu_seqlens.device() == sequences.offsets.device() &&
                         own == of_key + sequences.first;
    return is_view ? cached_offsets_with_room(sequences.cu_seqlens, sequences.first,
                                              sequences.count(), room)
                   : cached_offsets_with_room(sequences.offsets, 0, sequences.count(), room);
  }

  void count(const Call& call, bool is_backward) const {
    PlanKey key{};
    auto* next = key.begin();
    for (const int64_t one :
         {int64_t{is_backward}, int64_t{q.get_device()}, int64_t{call.causal},
          static_cast<int64_t>(q.scalar_type()), queries.sequences, queries.longest, keys.longest,
          queries.tokens, keys.tokens, q.size(1), k.size(1), q.size(2), v.size(2), q.stride(0),
          q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)}) {
      *next++ = one;
    }
    count_plan(key);
  }
};

Tensor of_tokens(const Tensor& rows, int64_t tokens) {
  return rows.size(0) == tokens ? rows : rows.narrow(0, 0, tokens);
}

std::optional<Output> forward(const Call& call) {
  const Prepared own(call);
  own.count(call, /*is_backward=*/false);
  const auto result = at::_cudnn_attention_forward(
      own.q, own.k, own.v, /*attn_bias=*/std::nullopt, own.query_offsets, own.key_offsets,
      own.queries.longest, own.keys.longest, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
      call.causal, /*return_debug_mask=*/false, call.scale);
  const int64_t tokens = call.q.size(0);
  Tensor out = unpad_last_dim(of_tokens(std::get<0>(result), tokens), call.v.size(2));
  Tensor logsumexp = std::get<1>(result).narrow(1, 0, tokens).contiguous();
  zero_tail({out, logsumexp.t()}, call.queries);
  return Output{out, logsumexp};
}

std::optional<Gradients> backward(const Call& call, const Outer& outer) {
  const Prepared own(call);
  own.count(call, /*is_backward=*/true);
  const int64_t tokens = own.queries.tokens;
  Tensor logsumexp = outer.logsumexp.contiguous();
  if (logsumexp.size(1) != tokens) {
    logsumexp = at::empty({logsumexp.size(0), tokens}, logsumexp.options());
    logsumexp.narrow(1, 0, call.q.size(0)).copy_(outer.logsumexp);
  }
  const Tensor no_dropout_state = at::empty({2}, call.q.options().dtype(at::kLong));
  auto [grad_q, grad_k, grad_v] = at::_cudnn_attention_backward(
      Prepared::rows(outer.grad_out.contiguous(), tokens), own.q, own.k, own.v,
      Prepared::rows(outer.out, tokens), logsumexp, no_dropout_state, no_dropout_state,
      /*attn_bias=*/Tensor(), own.query_offsets, own.key_offsets, own.queries.longest,
      own.keys.longest, /*dropout_p=*/0.0, call.causal, call.scale);
  return with_zero_tails(call, {unpad_last_dim(of_tokens(grad_q, call.q.size(0)), call.q.size(2)),
                                unpad_last_dim(of_tokens(grad_k, call.k.size(0)), call.k.size(2)),
                                unpad_last_dim(of_tokens(grad_v, call.v.size(0)), call.v.size(2))});
}

// Ranked below PyTorch's flash kernels: on a GPU without measurements it was never tried.
const RegisterBackend registered({"cudnn", /*preference=*/95, takes, forward, backward,
                                  /*warn=*/nullptr, extra_us_of_plan});

}  // namespace

std::string why_no_cudnn(int64_t sm) {
  if (!runs_on(sm)) return c10::str("it runs on GPUs of sm_90 and sm_100, got sm_", sm);
  if (!kTorchTakesPacks) {
    return "it needs torch 2.15: before, torch makes a plan at every call, or takes no grouped "
           "queries; this cuseq was built for torch " TORCH_VERSION;
  }
  const int64_t version = cudnn_version();
  if (version >= kLeastCudnn) return "";
  return c10::str("it needs cuDNN 9.24, got ", version / 10000, ".", version / 100 % 100);
}

}  // namespace cuseq::attention
