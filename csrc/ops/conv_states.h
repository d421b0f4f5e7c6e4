#pragma once

#include "ops/causal_conv1d.h"

// The states of one channel of one sequence: the convolution's final state, and the gradients of
// both states. `Memory` reads and writes elements of any type: Memory::load<A>(data, type, index),
// Memory::store(data, type, index, value).
namespace cuseq {

template <typename A>
CUSEQ_HOST_DEVICE A silu_slope(A value, A sigmoid) {
  return sigmoid * (1 + value * (1 - sigmoid));
}

template <typename A, typename Memory>
struct ConvChannel {
  const ConvArgs& args;
  int64_t sequence;
  int64_t channel;
  int64_t row;
  int64_t begin;
  int64_t length;

  CUSEQ_HOST_DEVICE ConvChannel(const ConvArgs& args, int64_t sequence, int64_t channel)
      : args(args),
        sequence(sequence),
        channel(channel),
        row(args.sequences.are_segments() ? 0 : sequence),
        begin(args.sequences.begin(sequence)),
        length(args.sequences.length(sequence)) {}

  CUSEQ_HOST_DEVICE int entries() const { return args.sequences.width - 1; }

  CUSEQ_HOST_DEVICE A state(const ConvStates& states, int64_t entry) const {
    if (states.data == nullptr) return 0;
    return Memory::template load<A>(states.data, states.dtype, states.at(sequence, channel, entry));
  }

  CUSEQ_HOST_DEVICE A of_row(const ConvRows& rows, int64_t position) const {
    return Memory::template load<A>(rows.data, args.dtype, rows.at(row, begin + position, channel));
  }

  // Return the input at a position; in front of the sequence that is the initial state.
  CUSEQ_HOST_DEVICE A input(int64_t position) const {
    return position >= 0 ? of_row(args.x, position) : state(args.initial, entries() + position);
  }

  CUSEQ_HOST_DEVICE A weight(int64_t lag) const {
    return Memory::template load<A>(
        args.weight, args.weight_dtype,
        channel * args.weight_strides[0] + (entries() - lag) * args.weight_strides[1]);
  }

  // Write the last tokens of the sequence, or of state and sequence together.
  CUSEQ_HOST_DEVICE void write_final() const {
    for (int entry = 0; entry < entries(); ++entry) {
      Memory::store(args.final.data, args.final.dtype, args.final.at(sequence, channel, entry),
                    input(length - entries() + entry));
    }
  }

  // Add the gradient of the final state to that of the last tokens. `args` are the backward's.
  CUSEQ_HOST_DEVICE void add_final_gradient() const {
    for (int entry = 0; entry < entries(); ++entry) {
      const int64_t position = length - entries() + entry;
      if (position < 0) continue;
      Memory::store(args.out.data, args.dtype, args.out.at(row, begin + position, channel),
                    of_row(args.out, position) + state(args.final, entry));
    }
  }

  // Return the gradient of the convolution's sum at a position.
  CUSEQ_HOST_DEVICE A gradient(const ConvRows& grad_out, int64_t position) const {
    const A grad = of_row(grad_out, position);
    if (!args.silu) return grad;
    A sum = args.bias == nullptr ? A(0)
                                 : Memory::template load<A>(args.bias, args.weight_dtype,
                                                            channel * args.bias_stride);
    for (int lag = 0; lag <= entries(); ++lag) sum += weight(lag) * input(position - lag);
    return grad * silu_slope(sum, 1 / (1 + Memory::exp(-sum)));
  }

  CUSEQ_HOST_DEVICE void write_initial_gradient(const ConvRows& grad_out,
                                                const ConvStates& grad_initial) const {
    A grads[kMaxConvWidth - 1] = {};
    for (int position = 0; position < entries() && position < length; ++position) {
      const A grad = gradient(grad_out, position);
      for (int entry = position; entry < entries(); ++entry) {
        grads[entry] += grad * weight(position + entries() - entry);
      }
    }
    for (int entry = 0; entry < entries(); ++entry) {
      // A short sequence leaves the end of the initial state in the final one.
      if (entry >= length) grads[entry] += state(args.final, entry - length);
      Memory::store(grad_initial.data, grad_initial.dtype,
                    grad_initial.at(sequence, channel, entry), grads[entry]);
    }
  }
};

}  // namespace cuseq
