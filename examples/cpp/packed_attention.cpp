// Attention over two packed documents from C++, without Python.
//
//   prefix=$(python -c 'import cuseq; print(cuseq.__path__[0])')
//   cmake -S examples/cpp -B build/cpp -DCMAKE_PREFIX_PATH=$prefix && cmake --build build/cpp
//   build/cpp/packed_attention
//
// With an editable install add -DTORCH_ROOT=$(python -c 'import torch; print(torch.__path__[0])').
#include <ATen/ATen.h>
#include <cuseq/attention.h>

#include <cstdio>

int main() {
  at::manual_seed(0);
  const at::Tensor q = at::randn({7, 4, 16}), k = at::randn({7, 2, 16}), v = at::randn({7, 2, 16});
  cuseq::AttentionOptions options;
  options.cu_seqlens = at::tensor({0, 3, 7}, at::kInt);  // documents of 3 and 4 tokens
  const at::Tensor packed = std::get<0>(cuseq::varlen_attention(q, k, v, options));

  options.cu_seqlens = at::tensor({0, 4}, at::kInt);
  const auto second = [](const at::Tensor& row) { return row.slice(0, 3); };
  const at::Tensor alone =
      std::get<0>(cuseq::varlen_attention(second(q), second(k), second(v), options));

  const double apart = (second(packed) - alone).abs().max().item<double>();
  std::printf("the second document, packed and alone, differs by %g\n", apart);
  return apart < 1e-6 ? 0 : 1;
}
