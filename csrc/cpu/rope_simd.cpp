#include "cpu/rope_simd.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/vectors.h"

namespace cuseq::cpu::CUSEQ_CAPABILITY {
namespace {

constexpr int64_t kMaxHeadDim = 512;

// One head in the arithmetic's type, with room for a full vector at the end.
template <typename A>
using HeadBuffer = A[kMaxHeadDim + 64];

template <typename A>
void turn(Vectorized<A>& a, Vectorized<A>& b, Vectorized<A> cos, Vectorized<A> sin) {
  const Vectorized<A> x = a;
  a = x * cos - b * sin;
  b = b * cos + x * sin;
}

// The cosines and sines of one token.
template <typename A>
struct Angles {
  HeadBuffer<A> cos;
  HeadBuffer<A> sin;

  template <typename T>
  void load_plane(const RopeArgs& args, int plane, int64_t batch, int64_t token) {
    const RopeTable& table = args.table;
    const RopePositions& positions = args.positions;
    const int64_t pairs = args.rotary_dim / 2;
    int64_t row = token;
    bool exists = true;
    if (positions.source != PositionSource::kToken) {
      row = position(args, plane, batch, token);
      // The position may be unchecked. Outside the table it gives NaN below, so that the error
      // shows and no memory outside the table is read.
      exists = row >= 0 && row < table.rows;
    }
    // A table indexed by position is shared by all planes and batches, so those strides are 0.
    const auto at = [&](const void* base, const int64_t(&strides)[3]) {
      return static_cast<const T*>(base) + plane * strides[0] + batch * strides[1] +
             row * strides[2];
    };
    const T* cos_row = exists ? at(table.cos, table.cos_strides) : nullptr;
    const T* sin_row = exists ? at(table.sin, table.sin_strides) : nullptr;
    const bool all_pairs = args.planes.kind == Planes::kOne;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (!all_pairs && args.planes.plane_of(static_cast<int>(pair)) != plane) continue;
      const int64_t column = pair * table.column_step;
      cos[pair] = exists ? static_cast<A>(cos_row[column]) : std::numeric_limits<A>::quiet_NaN();
      sin[pair] = exists ? static_cast<A>(sin_row[column]) : std::numeric_limits<A>::quiet_NaN();
    }
  }

  void load(const RopeArgs& args, int64_t batch, int64_t token, bool inverse) {
    for (int plane = 0; plane < args.planes.count(); ++plane) {
      dispatch_float(args.table.dtype,
                     [&]<typename T>() { load_plane<T>(args, plane, batch, token); });
    }
    if (!inverse) return;
    for (int64_t pair = 0; pair < args.rotary_dim / 2; ++pair) sin[pair] = -sin[pair];
  }

  static int64_t position(const RopeArgs& args, int plane, int64_t batch, int64_t token) {
    const RopePositions& positions = args.positions;
    switch (positions.source) {
      case PositionSource::kDense:
        return positions.dense(token);
      case PositionSource::kSegments: {
        const int64_t flat = batch * args.tokens + token;
        return positions.in_segment(flat, positions.seqlens.segment_of(flat * positions.cp_size));
      }
      case PositionSource::kIds:
        return positions.given(plane, batch, token);
      case PositionSource::kToken:
        break;
    }
    return token;
  }

  std::pair<Vectorized<A>, Vectorized<A>> cosines(int64_t pair) const {
    return {Vectorized<A>::loadu(cos + pair), Vectorized<A>::loadu(cos + pair + kPair<A> / 2)};
  }
  std::pair<Vectorized<A>, Vectorized<A>> sines(int64_t pair) const {
    return {Vectorized<A>::loadu(sin + pair), Vectorized<A>::loadu(sin + pair + kPair<A> / 2)};
  }
};

// Rotate one head from `in` to `out`, which may be the same.
template <typename A, typename In, typename Out>
void turn_head(const RopeArgs& args, const Angles<A>& angles, const In* in, Out* out) {
  const int64_t rotary = args.rotary_dim;
  const int64_t half = rotary / 2;
  if (args.interleaved) {
    for (int64_t i = 0; i < rotary; i += kPair<A>) {
      const auto [low, high] = load<A>(in + i, rotary - i);
      auto [even, odd] = at::vec::deinterleave2(low, high);
      turn(even, odd, angles.cosines(i / 2).first, angles.sines(i / 2).first);
      const auto [first, second] = at::vec::interleave2(even, odd);
      store(out + i, first, second, rotary - i);
    }
  } else {
    for (int64_t i = 0; i < half; i += kPair<A>) {
      auto [a_low, a_high] = load<A>(in + i, half - i);
      auto [b_low, b_high] = load<A>(in + half + i, half - i);
      const auto [cos_low, cos_high] = angles.cosines(i);
      const auto [sin_low, sin_high] = angles.sines(i);
      turn(a_low, b_low, cos_low, sin_low);
      turn(a_high, b_high, cos_high, sin_high);
      store(out + i, a_low, a_high, half - i);
      store(out + half + i, b_low, b_high, half - i);
    }
  }
  if (static_cast<const void*>(in) == static_cast<void*>(out)) return;
  for (int64_t i = rotary; i < args.head_dim; i += kPair<A>) {
    const auto [low, high] = load<A>(in + i, args.head_dim - i);
    store(out + i, low, high, args.head_dim - i);
  }
}

int64_t offset_of(const int64_t (&strides)[3], int64_t batch, int64_t token, int64_t head) {
  return batch * strides[0] + token * strides[1] + head * strides[2];
}

// Call each(token in the flat row, batch, token in its batch row) for the tokens of a range.
template <typename Each>
void over_tokens(const RopeArgs& args, int64_t first, int64_t last, const Each& each) {
  for (int64_t token = first; token < last; ++token) {
    const int64_t batch = token / args.tokens;
    each(token, batch, token - batch * args.tokens);
  }
}

template <typename Each>
void over_all_tokens(const RopeArgs& args, const Each& each) {
  constexpr int64_t kGrain = 1 << 14;  // elements
  const int64_t heads = args.tensors[0].heads + args.tensors[1].heads;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, heads * args.head_dim));
  at::parallel_for(0, args.batch * args.tokens, grain,
                   [&](int64_t first, int64_t last) { over_tokens(args, first, last, each); });
}

template <typename A>
A sum_of(const A* values, int64_t count) {
  Vectorized<A> sum(0);
  for (int64_t i = 0; i < count; i += Vectorized<A>::size()) {
    sum =
        sum + Vectorized<A>::loadu(values + i, std::min(count - i, int64_t{Vectorized<A>::size()}));
  }
  return at::vec::vec_reduce_all<A>([](auto& x, auto& y) { return x + y; }, sum);
}

template <typename A>
void load_weight(const QkNormRopeArgs& args, const HeadNorm& norm, A* weight) {
  dispatch_float(args.weight_dtype, [&]<typename W>() {
    const W* values = static_cast<const W*>(norm.weight);
    for (int64_t i = 0; i < args.rope.head_dim; ++i) {
      weight[i] = static_cast<A>(values[i]) + static_cast<A>(args.weight_offset);
    }
  });
}

template <typename T>
void norm_and_turn(const QkNormRopeArgs& args) {
  using A = Arithmetic<T>;
  const RopeArgs& rope = args.rope;
  HeadBuffer<A> weights[2];
  for (int i = 0; i < rope.n_tensors; ++i) load_weight(args, args.norms[i], weights[i]);
  over_all_tokens(rope, [&](int64_t token, int64_t batch, int64_t in_batch) {
    Angles<A> angles;
    angles.load(rope, batch, in_batch, rope.inverse);
    for (int i = 0; i < rope.n_tensors; ++i) {
      const RopeTensor& tensor = rope.tensors[i];
      for (int64_t head = 0; head < tensor.heads; ++head) {
        const T* in =
            static_cast<const T*>(tensor.in) + offset_of(tensor.in_strides, batch, in_batch, head);
        T* out = static_cast<T*>(tensor.out) + offset_of(tensor.out_strides, batch, in_batch, head);
        HeadBuffer<A> x;
        HeadBuffer<A> squares;
        for (int64_t d = 0; d < rope.head_dim; d += kPair<A>) {
          const auto [low, high] = load<A>(in + d, rope.head_dim - d);
          store(x + d, low, high, kPair<A>);
          store(squares + d, low * low, high * high, kPair<A>);
        }
        const A rstd = 1 / std::sqrt(sum_of(squares, rope.head_dim) / rope.head_dim +
                                     static_cast<A>(args.eps));
        if (args.norms[i].rstd != nullptr) {
          static_cast<A*>(args.norms[i].rstd)[token * tensor.heads + head] = rstd;
        }
        for (int64_t d = 0; d < rope.head_dim; ++d) x[d] *= rstd * weights[i][d];
        turn_head(rope, angles, x, out);
      }
    }
  });
}

template <typename T>
void norm_and_turn_backward(const QkNormRopeArgs& args) {
  using A = Arithmetic<T>;
  const RopeArgs& rope = args.rope;
  const int64_t head_dim = rope.head_dim;
  HeadBuffer<A> weights[2];
  for (int i = 0; i < rope.n_tensors; ++i) load_weight(args, args.norms[i], weights[i]);
  auto* partials = static_cast<double*>(args.partials);
  if (partials != nullptr) std::fill_n(partials, args.n_partials * 2 * head_dim, 0.0);

  const int64_t tokens = rope.batch * rope.tokens;
  const auto part = [&](int64_t index) {
    const int64_t first = index * tokens / args.n_partials;
    const int64_t last = (index + 1) * tokens / args.n_partials;
    over_tokens(rope, first, last, [&](int64_t token, int64_t batch, int64_t in_batch) {
      Angles<A> angles;
      angles.load(rope, batch, in_batch, !rope.inverse);
      for (int i = 0; i < rope.n_tensors; ++i) {
        const RopeTensor& tensor = rope.tensors[i];
        const HeadNorm& norm = args.norms[i];
        double* sums = partials == nullptr ? nullptr : partials + (index * 2 + i) * head_dim;
        for (int64_t head = 0; head < tensor.heads; ++head) {
          const T* dy = static_cast<const T*>(tensor.in) +
                        offset_of(tensor.in_strides, batch, in_batch, head);
          const T* x = static_cast<const T*>(norm.input) +
                       offset_of(norm.input_strides, batch, in_batch, head);
          T* dx =
              static_cast<T*>(tensor.out) + offset_of(tensor.out_strides, batch, in_batch, head);
          const A rstd = static_cast<const A*>(norm.rstd)[token * tensor.heads + head];
          HeadBuffer<A> g;
          HeadBuffer<A> n;
          HeadBuffer<A> products;
          turn_head(rope, angles, dy, g);
          for (int64_t d = 0; d < head_dim; ++d) {
            n[d] = static_cast<A>(x[d]) * rstd;
            const A product = g[d] * n[d];
            if (sums != nullptr) sums[d] += product;
            g[d] *= weights[i][d];
            products[d] = product * weights[i][d];
          }
          const A dot = sum_of(products, head_dim) / head_dim;
          for (int64_t d = 0; d < head_dim; ++d) g[d] = rstd * (g[d] - n[d] * dot);
          for (int64_t d = 0; d < head_dim; d += kPair<A>) {
            const auto [low, high] = load<A>(g + d, head_dim - d);
            store(dx + d, low, high, head_dim - d);
          }
        }
      }
    });
  };
  at::parallel_for(0, args.n_partials, 1, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) part(index);
  });
  if (partials == nullptr) return;
  for (int i = 0; i < rope.n_tensors; ++i) {
    if (args.norms[i].weight_grad == nullptr) continue;
    dispatch_float(args.weight_dtype, [&]<typename W>() {
      for (int64_t d = 0; d < head_dim; ++d) {
        double sum = 0;
        for (int64_t p = 0; p < args.n_partials; ++p) sum += partials[(p * 2 + i) * head_dim + d];
        static_cast<W*>(args.norms[i].weight_grad)[d] = static_cast<W>(sum);
      }
    });
  }
}

}  // namespace

void apply_rope(const RopeArgs& args) {
  dispatch_float(args.dtype, [&]<typename T>() {
    using A = Arithmetic<T>;
    over_all_tokens(args, [&](int64_t, int64_t batch, int64_t token) {
      Angles<A> angles;
      angles.load(args, batch, token, args.inverse);
      for (int i = 0; i < args.n_tensors; ++i) {
        const RopeTensor& tensor = args.tensors[i];
        for (int64_t head = 0; head < tensor.heads; ++head) {
          turn_head(
              args, angles,
              static_cast<const T*>(tensor.in) + offset_of(tensor.in_strides, batch, token, head),
              static_cast<T*>(tensor.out) + offset_of(tensor.out_strides, batch, token, head));
        }
      }
    });
  });
}

void apply_qk_norm_rope(const QkNormRopeArgs& args) {
  dispatch_float(args.rope.dtype, [&]<typename T>() { norm_and_turn<T>(args); });
}

void apply_qk_norm_rope_backward(const QkNormRopeArgs& args) {
  dispatch_float(args.rope.dtype, [&]<typename T>() { norm_and_turn_backward<T>(args); });
}

}  // namespace cuseq::cpu::CUSEQ_CAPABILITY
