#include "cpu/causal_conv1d_simd.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/vectors.h"
#include "ops/conv_states.h"

// The row is cut into tiles of tokens and channels. A tile is loaded into rows of the arithmetic's
// type, whatever strides it has in memory, and every loop over its channels is vectorised.
namespace cuseq::cpu::CUSEQ_CAPABILITY {
namespace {

constexpr int kTokens = 32;               // tokens of a tile
constexpr int kChannels = 64;             // channels of a tile
constexpr int kHalo = kMaxConvWidth - 1;  // tokens before and after a tile that matter to it

template <typename A>
using Row = A[kChannels];

struct Memory {
  template <typename A>
  static A load(const void* data, FloatType type, int64_t index) {
    A value = 0;
    dispatch_float(
        type, [&]<typename T>() { value = static_cast<A>(static_cast<const T*>(data)[index]); });
    return value;
  }

  template <typename A>
  static void store(void* data, FloatType type, int64_t index, A value) {
    dispatch_float(type,
                   [&]<typename T>() { static_cast<T*>(data)[index] = static_cast<T>(value); });
  }

  template <typename A>
  static A exp(A value) {
    return std::exp(value);
  }
};

// Where a tile lies in a tensor [batch, tokens, channels].
struct Place {
  int64_t row = 0;
  int64_t token = 0;
  int64_t channel = 0;
  int tokens = 0;
  int channels = 0;
};

template <typename T, typename A>
void load_tile(const ConvRows& memory, const Place& place, Row<A>* rows) {
  const T* from =
      static_cast<const T*>(memory.data) + memory.at(place.row, place.token, place.channel);
  if (memory.strides[2] != 1) {
    for (int channel = 0; channel < place.channels; ++channel) {
      for (int token = 0; token < place.tokens; ++token) {
        rows[token][channel] =
            static_cast<A>(from[token * memory.strides[1] + channel * memory.strides[2]]);
      }
    }
    return;
  }
  for (int token = 0; token < place.tokens; ++token) {
    for (int64_t i = 0; i < place.channels; i += kPair<A>) {
      const auto [low, high] =
          load<A>(from + token * memory.strides[1] + i, std::min(kPair<A>, place.channels - i));
      low.store(rows[token] + i);
      high.store(rows[token] + i + Vectorized<A>::size());
    }
  }
}

template <typename T, typename A>
void store_tile(const ConvRows& memory, const Place& place, const Row<A>* rows) {
  T* to = static_cast<T*>(memory.data) + memory.at(place.row, place.token, place.channel);
  if (memory.strides[2] != 1) {
    for (int channel = 0; channel < place.channels; ++channel) {
      for (int token = 0; token < place.tokens; ++token) {
        to[token * memory.strides[1] + channel * memory.strides[2]] =
            static_cast<T>(rows[token][channel]);
      }
    }
    return;
  }
  for (int token = 0; token < place.tokens; ++token) {
    for (int64_t i = 0; i < place.channels; i += kPair<A>) {
      store<A>(to + token * memory.strides[1] + i, Vectorized<A>::loadu(rows[token] + i),
               Vectorized<A>::loadu(rows[token] + i + Vectorized<A>::size()),
               std::min(kPair<A>, place.channels - i));
    }
  }
}

// Call run(i) for the first element of each vector of a row.
template <typename A, typename Run>
void over_vectors(const Run& run) {
  for (int i = 0; i < kChannels; i += static_cast<int>(Vectorized<A>::size())) run(i);
}

template <typename A>
Vectorized<A> vector(const A* from) {
  return Vectorized<A>::loadu(from);
}

template <typename A>
Vectorized<A> sigmoid_of(Vectorized<A> value) {
  return Vectorized<A>(1) / (Vectorized<A>(1) + value.neg().exp());
}

// A tile with what it needs to know of the tokens around it. It has `before` tokens of halo in
// front of `place`, and `after` behind.
template <typename A>
class Tile {
 public:
  template <typename T>
  void load(const ConvArgs& args, const Place& tile) {
    args_ = &args;
    place = tile;
    before = static_cast<int>(std::min<int64_t>(kHalo, tile.token));
    after = static_cast<int>(
        std::min<int64_t>(kHalo, args.sequences.tokens - tile.token - tile.tokens));
    Place wide = tile;
    wide.token -= before;
    wide.tokens += before + after;
    load_tile<T>(args.x, wide, rows_);
    const ConvSequences& sequences = args.sequences;
    low_ = sequences.sequence_of(tile.row, tile.token, 0, sequences.count());
    high_ = sequences.sequence_of(tile.row, tile.token + tile.tokens + after - 1, low_,
                                  sequences.count());
    for (int token = 0; token < tile.tokens + after; ++token) {
      lags[token] = sequences.lags(tile.row, tile.token + token, low_, high_);
    }
  }

  // Return the row of each lag of a token; null for a lag that leads nowhere.
  void inputs_of(int token, const A* (&inputs)[kMaxConvWidth]) {
    const int width = args_->sequences.width;
    const int known = std::popcount(lags[token]);
    if (args_->initial.data != nullptr && known > 0 && known < width) read_state(token, known);
    for (int lag = 0; lag < kMaxConvWidth; ++lag) {
      inputs[lag] = nullptr;
      if ((lags[token] >> lag & 1) != 0) {
        inputs[lag] = rows_[before + token - lag];
      } else if (args_->initial.data != nullptr && known > 0 && lag < width) {
        inputs[lag] = state_[lag];
      }
    }
  }

  Place place;
  int before = 0;
  int after = 0;
  uint32_t lags[kTokens + kHalo] = {};

 private:
  void read_state(int token, int known) {
    const int64_t sequence =
        args_->sequences.sequence_of(place.row, place.token + token, low_, high_);
    for (int lag = known; lag < args_->sequences.width; ++lag) {
      const int entry = args_->sequences.width - 1 + known - 1 - lag;
      for (int channel = 0; channel < place.channels; ++channel) {
        state_[lag][channel] =
            Memory::load<A>(args_->initial.data, args_->initial.dtype,
                            args_->initial.at(sequence, place.channel + channel, entry));
      }
    }
  }

  const ConvArgs* args_ = nullptr;
  int64_t low_ = 0;
  int64_t high_ = 0;
  Row<A> rows_[kTokens + 2 * kHalo] = {};
  Row<A> state_[kMaxConvWidth] = {};
};

// Weights and bias of the channels of a tile; zero where the kernel is narrower.
template <typename A>
struct Weights {
  Row<A> of_lag[kMaxConvWidth] = {};
  Row<A> bias = {};

  Weights(const ConvArgs& args, int64_t first, int64_t channels) {
    const int width = args.sequences.width;
    for (int64_t i = 0; i < channels; ++i) {
      for (int lag = 0; lag < width; ++lag) {
        of_lag[lag][i] = Memory::load<A>(
            args.weight, args.weight_dtype,
            (first + i) * args.weight_strides[0] + (width - 1 - lag) * args.weight_strides[1]);
      }
      if (args.bias != nullptr) {
        bias[i] = Memory::load<A>(args.bias, args.weight_dtype, (first + i) * args.bias_stride);
      }
    }
  }

  Vectorized<A> sum(const A* const (&inputs)[kMaxConvWidth], int i) const {
    Vectorized<A> sum = vector(bias + i);
    for (int lag = 0; lag < kMaxConvWidth; ++lag) {
      if (inputs[lag] == nullptr) continue;
      sum = at::vec::fmadd(vector(of_lag[lag] + i), vector(inputs[lag] + i), sum);
    }
    return sum;
  }
};

int64_t stripes_of(const ConvArgs& args) { return ceil_div(args.channels, kChannels); }
int64_t tiles_of(const ConvArgs& args) { return ceil_div(args.sequences.tokens, kTokens); }

// Return the place of the tile number `tile` of all batch rows.
Place place_of(const ConvArgs& args, int64_t tile, int64_t stripe) {
  const int64_t tiles = std::max<int64_t>(1, tiles_of(args));
  Place place;
  place.row = tile / tiles;
  place.token = tile % tiles * kTokens;
  place.channel = stripe * kChannels;
  place.tokens = static_cast<int>(std::min<int64_t>(kTokens, args.sequences.tokens - place.token));
  place.channels = static_cast<int>(std::min<int64_t>(kChannels, args.channels - place.channel));
  return place;
}

// Call run(stripe, tile) for all tiles, in parallel.
template <typename Run>
void over_tiles(const ConvArgs& args, const Run& run) {
  const int64_t tiles = tiles_of(args) * args.sequences.batch;
  at::parallel_for(0, tiles * stripes_of(args), 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) run(i / tiles, i % tiles);
  });
}

// Call run(ConvChannel) for each channel of each sequence, in parallel.
template <typename A, typename Run>
void over_states(const ConvArgs& args, const Run& run) {
  const int64_t all = args.sequences.count() * args.channels;
  at::parallel_for(0, all, 1024, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      run(ConvChannel<A, Memory>(args, i / args.channels, i % args.channels));
    }
  });
}

template <typename T>
void convolve(const ConvArgs& args) {
  using A = Arithmetic<T>;
  over_tiles(args, [&](int64_t stripe, int64_t number) {
    const Place place = place_of(args, number, stripe);
    const Weights<A> weights(args, place.channel, place.channels);
    Tile<A> tile;
    tile.template load<T>(args, place);
    Row<A> out[kTokens] = {};
    for (int token = 0; token < place.tokens; ++token) {
      if (tile.lags[token] == 0) continue;
      const A* inputs[kMaxConvWidth];
      tile.inputs_of(token, inputs);
      over_vectors<A>([&](int i) {
        Vectorized<A> sum = weights.sum(inputs, i);
        if (args.silu) sum = sum * sigmoid_of(sum);
        sum.store(out[token] + i);
      });
    }
    store_tile<T>(args.out, place, out);
  });
  if (args.final.data != nullptr) {
    over_states<A>(args, [](const ConvChannel<A, Memory>& channel) { channel.write_final(); });
  }
}

// Sums of gradients over tokens, in float64: those of the lags, then the bias'.
using Sums = Row<double>[kMaxConvWidth + 1];

// Compute the gradient of a tile of x, and add the tile's part of the weights' gradients to `sums`.
template <typename T, typename A>
void convolve_back(const ConvBackwardArgs& args, const Place& place, const Weights<A>& weights,
                   Sums& sums) {
  const ConvArgs& conv = args.conv;
  Tile<A> tile;
  tile.template load<T>(conv, place);
  Row<A> grads[kTokens + kHalo] = {};
  Place wide = place;
  wide.tokens += tile.after;
  load_tile<T>(args.grad_out, wide, grads);
  Row<A> tile_sums[kMaxConvWidth + 1] = {};
  for (int token = 0; token < wide.tokens; ++token) {
    if (tile.lags[token] == 0) {
      std::fill_n(grads[token], kChannels, A(0));  // padding may hold NaN
      continue;
    }
    const A* inputs[kMaxConvWidth];
    tile.inputs_of(token, inputs);
    over_vectors<A>([&](int i) {
      Vectorized<A> grad = vector(grads[token] + i);
      if (conv.silu) {
        const Vectorized<A> sum = weights.sum(inputs, i);
        const Vectorized<A> one(1);
        const Vectorized<A> sigmoid = sigmoid_of(sum);
        grad = grad * sigmoid * (one + sum * (one - sigmoid));
        grad.store(grads[token] + i);
      }
      if (args.partials == nullptr || token >= place.tokens) return;
      for (int lag = 0; lag < kMaxConvWidth; ++lag) {
        if (inputs[lag] == nullptr) continue;
        at::vec::fmadd(grad, vector(inputs[lag] + i), vector(tile_sums[lag] + i))
            .store(tile_sums[lag] + i);
      }
      (grad + vector(tile_sums[kMaxConvWidth] + i)).store(tile_sums[kMaxConvWidth] + i);
    });
  }
  for (int lag = 0; lag <= kMaxConvWidth; ++lag) {
    for (int i = 0; i < place.channels; ++i) sums[lag][i] += tile_sums[lag][i];
  }
  Row<A> out[kTokens] = {};
  for (int token = 0; token < place.tokens; ++token) {
    over_vectors<A>([&](int i) {
      Vectorized<A> sum(0);
      for (int lag = 0; lag < kMaxConvWidth && token + lag < wide.tokens; ++lag) {
        if ((tile.lags[token + lag] >> lag & 1) == 0) continue;
        sum = at::vec::fmadd(vector(weights.of_lag[lag] + i), vector(grads[token + lag] + i), sum);
      }
      sum.store(out[token] + i);
    });
  }
  store_tile<T>(conv.out, place, out);
}

// Write the sums of one part of the tokens.
void write_partial(const ConvBackwardArgs& args, int64_t part, const Place& place,
                   const Sums& sums) {
  const int width = args.conv.sequences.width;
  const int64_t channels = args.conv.channels;
  double* partial =
      static_cast<double*>(args.partials) + part * (width + 1) * channels + place.channel;
  for (int i = 0; i < place.channels; ++i) {
    for (int lag = 0; lag < width; ++lag) partial[lag * channels + i] = sums[lag][i];
    partial[width * channels + i] = sums[kMaxConvWidth][i];
  }
}

void add_partials(const ConvBackwardArgs& args) {
  const int width = args.conv.sequences.width;
  const int64_t channels = args.conv.channels;
  const auto* partials = static_cast<const double*>(args.partials);
  at::parallel_for(0, channels * (width + 1), 4096, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      double sum = 0;
      for (int64_t part = 0; part < args.n_partials; ++part) {
        sum += partials[part * (width + 1) * channels + i];
      }
      const int64_t lag = i / channels;
      const int64_t channel = i % channels;
      if (lag < width) {
        Memory::store(args.grad_weight, args.conv.weight_dtype, channel * width + width - 1 - lag,
                      sum);
      } else if (args.grad_bias != nullptr) {
        Memory::store(args.grad_bias, args.conv.weight_dtype, channel, sum);
      }
    }
  });
}

template <typename T>
void convolve_backward(const ConvBackwardArgs& args) {
  using A = Arithmetic<T>;
  const ConvArgs& conv = args.conv;
  const int64_t tiles = tiles_of(conv) * conv.sequences.batch;
  const int64_t parts = args.n_partials;
  at::parallel_for(0, parts * stripes_of(conv), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t part = i % parts;
      Place place = place_of(conv, 0, i / parts);
      const Weights<A> weights(conv, place.channel, place.channels);
      Sums sums = {};
      for (int64_t tile = tiles * part / parts; tile < tiles * (part + 1) / parts; ++tile) {
        place = place_of(conv, tile, i / parts);
        convolve_back<T>(args, place, weights, sums);
      }
      if (args.partials != nullptr) write_partial(args, part, place, sums);
    }
  });
  if (args.partials != nullptr) add_partials(args);
  if (args.grad_initial.data != nullptr) {
    over_states<A>(conv, [&](const ConvChannel<A, Memory>& channel) {
      channel.write_initial_gradient(args.grad_out, args.grad_initial);
    });
  }
  if (conv.final.data != nullptr) {
    over_states<A>(conv,
                   [](const ConvChannel<A, Memory>& channel) { channel.add_final_gradient(); });
  }
}

}  // namespace

void causal_conv1d(const ConvArgs& args) {
  dispatch_float(args.dtype, [&]<typename T>() { convolve<T>(args); });
}

void causal_conv1d_backward(const ConvBackwardArgs& args) {
  dispatch_float(args.conv.dtype, [&]<typename T>() { convolve_backward<T>(args); });
}

}  // namespace cuseq::cpu::CUSEQ_CAPABILITY
