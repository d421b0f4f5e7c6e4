#include "ops/causal_conv1d.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "cuseq/ops.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/dtype_name.h"
#include "ops/types.h"

// Checks, allocation and kernels; autograd and autocast are in causal_conv1d_autograd.cpp.
namespace cuseq {
namespace {

constexpr int64_t kMaxChannels = 1 << 18;  // fits in a CUDA grid however the channels are divided

// Return whether the elements of a dimension lie side by side. A single one does, whatever its
// stride, which slices leave at any value.
bool is_contiguous_in(const Tensor& rows, int64_t dim) {
  return rows.size(dim) == 1 || rows.stride(dim) == 1;
}

// Return whether tokens, not channels, are contiguous in memory.
bool is_channel_major(const Tensor& rows) {
  return !is_contiguous_in(rows, -1) && is_contiguous_in(rows, -2);
}

bool has_contiguous_dim(const Tensor& rows) {
  return rows.numel() == 0 || is_contiguous_in(rows, -1) || is_contiguous_in(rows, -2);
}

// Return an uninitialised dense tensor with the order of dimensions of `like`.
Tensor empty_rows(const Tensor& like) {
  if (!is_channel_major(like)) return at::empty(like.sizes(), like.options());
  const int64_t tokens = like.size(-2);
  if (like.dim() == 2) return at::empty_strided(like.sizes(), {1, tokens}, like.options());
  return at::empty_strided(like.sizes(), {tokens * like.size(-1), 1, tokens}, like.options());
}

ConvRows rows_of(const Tensor& tensor) {
  ConvRows rows;
  rows.data = const_cast<void*>(tensor.const_data_ptr());
  rows.strides[0] = tensor.dim() == 3 ? tensor.stride(0) : 0;
  rows.strides[1] = tensor.stride(-2);
  rows.strides[2] = tensor.stride(-1);
  return rows;
}

void check_on(const Tensor& tensor, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(tensor.device() == x.device(), name, " must lie on x's device, ", x.device(),
                    ", got ", tensor.device());
}

void check_rows(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3,
                    "x must have shape [tokens, channels] or [batch, tokens, channels], got ",
                    x.sizes());
  TORCH_CHECK_VALUE(x.size(-1) <= kMaxChannels, "x must have at most ", kMaxChannels,
                    " channels, got ", x.size(-1));
  TORCH_CHECK_VALUE(has_contiguous_dim(x),
                    "x must be contiguous in its channels or in its tokens, got strides ",
                    x.strides(), " for shape ", x.sizes());
}

void read_weight(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 ConvArgs& args) {
  args.weight_dtype = float_type(weight, "weight");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) == args.channels && weight.size(1) >= 2 &&
                        weight.size(1) <= kMaxConvWidth,
                    "weight must have shape [channels = ", args.channels,
                    ", width] with a width of 2 to ", kMaxConvWidth, ", got ", weight.sizes());
  check_on(weight, "weight", x);
  args.weight = weight.const_data_ptr();
  args.weight_strides[0] = weight.stride(0);
  args.weight_strides[1] = weight.stride(1);
  args.sequences.width = static_cast<int>(weight.size(1));
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == args.channels,
                    "bias must have shape [channels = ", args.channels, "], got ", bias->sizes());
  TORCH_CHECK_TYPE(bias->scalar_type() == weight.scalar_type(), "bias must be of weight's dtype, ",
                   dtype_name(weight.scalar_type()), ", got ", dtype_name(bias->scalar_type()));
  check_on(*bias, "bias", x);
  args.bias = bias->const_data_ptr();
  args.bias_stride = bias->stride(0);
}

void read_sequences(const Tensor& x, const ConvOptions& options, ConvSequences& sequences) {
  sequences.tokens = x.size(-2);
  sequences.batch = x.dim() == 3 ? x.size(0) : 1;
  check_tokens(sequences.tokens);
  const bool has_states = options.initial_states.has_value() || options.final_states;
  if (options.seq_idx.has_value()) {
    const Tensor& seq_idx = *options.seq_idx;
    TORCH_CHECK_VALUE(!options.cu_seqlens.has_value(),
                      "seq_idx must be None with cu_seqlens, which say where sequences lie");
    TORCH_CHECK_VALUE(!has_states, "seq_idx must be None with initial or final states");
    TORCH_CHECK_TYPE(seq_idx.scalar_type() == at::kInt, "seq_idx must be int32, got ",
                     dtype_name(seq_idx.scalar_type()));
    TORCH_CHECK_VALUE(seq_idx.dim() == 2 && seq_idx.size(0) == sequences.batch &&
                          seq_idx.size(1) == sequences.tokens,
                      "seq_idx must have shape [batch = ", sequences.batch,
                      ", tokens = ", sequences.tokens, "], got ", seq_idx.sizes());
    check_on(seq_idx, "seq_idx", x);
    sequences.seq_idx = seq_idx.const_data_ptr<int32_t>();
    sequences.seq_idx_strides[0] = seq_idx.stride(0);
    sequences.seq_idx_strides[1] = seq_idx.stride(1);
    return;
  }
  TORCH_CHECK_VALUE(options.cu_seqlens.has_value() || !options.cu_seqlens_padded.has_value(),
                    "cu_seqlens_padded must come with cu_seqlens, got cu_seqlens=None");
  if (!options.cu_seqlens.has_value()) return;
  TORCH_CHECK_VALUE(sequences.batch == 1,
                    "x must be one row with cu_seqlens, [tokens, channels], got ", x.sizes());
  check_offsets(*options.cu_seqlens);
  check_on(*options.cu_seqlens, "cu_seqlens", x);
  check_offset_values(*options.cu_seqlens, sequences.tokens);
  check_padded_offsets(options.cu_seqlens_padded, *options.cu_seqlens, sequences.tokens);
  sequences.segments =
      segments_of(*options.cu_seqlens, options.cu_seqlens_padded, sequences.tokens);
}

ConvStates states_of(const Tensor& states, const char* name, const Tensor& x,
                     const ConvArgs& args) {
  const int64_t entries = args.sequences.width - 1;
  TORCH_CHECK_VALUE(states.dim() == 3 && states.size(0) == args.sequences.count() &&
                        states.size(1) == args.channels && states.size(2) == entries,
                    name, " must have shape [sequences = ", args.sequences.count(),
                    ", channels = ", args.channels, ", width - 1 = ", entries, "], got ",
                    states.sizes());
  check_on(states, name, x);
  ConvStates read;
  read.dtype = float_type(states, name);
  read.data = const_cast<void*>(states.const_data_ptr());
  for (int i = 0; i < 3; ++i) read.strides[i] = states.stride(i);
  return read;
}

// Check everything before any memory is accessed, and fill in all arguments except the outputs.
ConvArgs plan(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const ConvOptions& options) {
  check_rows(x);
  ConvArgs args;
  args.dtype = float_type(x, "x");
  args.channels = x.size(-1);
  args.channel_major = is_channel_major(x);
  args.silu = options.silu;
  args.x = rows_of(x);
  read_weight(x, weight, bias, args);
  read_sequences(x, options, args.sequences);
  if (options.initial_states.has_value()) {
    args.initial = states_of(*options.initial_states, "initial_states", x, args);
  }
  return args;
}

std::vector<Tensor> forward_kernel(const Tensor& x, const Tensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                                   const OptionalTensor& cu_seqlens_padded,
                                   const OptionalTensor& seq_idx,
                                   const OptionalTensor& initial_states, bool silu,
                                   bool final_states) {
  const ConvOptions options{cu_seqlens, cu_seqlens_padded, seq_idx, initial_states,
                            silu,       final_states};
  ConvArgs args = plan(x, weight, bias, options);
  std::vector<Tensor> outputs;
  outputs.reserve(2);
  outputs.push_back(empty_rows(x));
  args.out = rows_of(outputs[0]);
  if (final_states) {
    const auto dtype = initial_states.has_value() ? initial_states->scalar_type() : x.scalar_type();
    outputs.push_back(at::empty({args.sequences.count(), args.channels, args.sequences.width - 1},
                                x.options().dtype(dtype)));
    args.final = states_of(outputs[1], "final_states", x, args);
  }
  CUSEQ_RUN(causal_conv1d, x, args);
  return outputs;
}

at::ScalarType type_of_sums(const Tensor& x) {
  return x.is_cpu() || x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<Tensor> backward_kernel(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                                    const OptionalTensor& cu_seqlens_padded,
                                    const OptionalTensor& seq_idx,
                                    const OptionalTensor& initial_states, bool silu,
                                    const OptionalTensor& grad_final_states, bool weight_grads) {
  const ConvOptions options{
      cu_seqlens, cu_seqlens_padded, seq_idx, initial_states, silu, grad_final_states.has_value()};
  ConvBackwardArgs args;
  args.conv = plan(x, weight, bias, options);
  ConvArgs& conv = args.conv;
  TORCH_CHECK_VALUE(grad_out.sizes() == x.sizes(), "grad_out must have x's shape, ", x.sizes(),
                    ", got ", grad_out.sizes());
  TORCH_CHECK_TYPE(grad_out.scalar_type() == x.scalar_type(), "grad_out must be of x's dtype, ",
                   dtype_name(x.scalar_type()), ", got ", dtype_name(grad_out.scalar_type()));
  check_on(grad_out, "grad_out", x);
  TORCH_CHECK_VALUE(
      grad_out.numel() == 0 || is_contiguous_in(grad_out, conv.channel_major ? -2 : -1),
      "grad_out must be contiguous in the dimension in which x is, got strides ",
      grad_out.strides(), " for x's ", x.strides());
  args.grad_out = rows_of(grad_out);
  std::vector<Tensor> grads;
  grads.reserve(4);
  grads.push_back(empty_rows(x));
  conv.out = rows_of(grads[0]);
  if (weight_grads) {
    grads.push_back(at::empty(weight.sizes(), weight.options()));
    args.grad_weight = grads.back().mutable_data_ptr();
    if (bias.has_value()) {
      grads.push_back(at::empty(bias->sizes(), bias->options()));
      args.grad_bias = grads.back().mutable_data_ptr();
    }
  }
  if (initial_states.has_value()) {
    grads.push_back(at::empty(initial_states->sizes(), initial_states->options()));
    args.grad_initial = states_of(grads.back(), "grad_initial_states", x, conv);
  }
  if (grad_final_states.has_value()) {
    conv.final = states_of(*grad_final_states, "grad_final_states", x, conv);
  }
  const auto run = [&] {
    Tensor partials;
    if (weight_grads) {
      partials = at::empty({args.n_partials, conv.sequences.width + 1, conv.channels},
                           x.options().dtype(type_of_sums(x)));
      args.partials = partials.mutable_data_ptr();
    }
    CUSEQ_RUN(causal_conv1d_backward, x, args);
  };
#ifdef CUSEQ_WITH_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());
    args.n_partials = cuda::conv_partials(args);
    run();
    return grads;
  }
#endif
  args.n_partials = cpu::conv_partials(args);
  run();
  return grads;
}

}  // namespace

CUSEQ_REGISTER(m) {
  m.impl("causal_conv1d", TORCH_FN(forward_kernel));
  m.impl("causal_conv1d_backward", TORCH_FN(backward_kernel));
}

}  // namespace cuseq
