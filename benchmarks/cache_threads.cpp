// Hits of the identity cache from threads of C++, as autograd's are: they do not queue for the GIL.
//
//     cuseq_cache_threads DEVICE
//
// Prints one line for each number of threads and kind of key: threads, kind, millions of hits a
// second over all threads together.
#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cuseq/cache.h"
#include "cuseq/ops.h"

namespace {

constexpr int64_t kHits = 400'000;

// In millions a second; `keys` holds one for each thread, which may be the same.
double throughput(const std::vector<at::Tensor>& keys) {
  for (const at::Tensor& key : keys) cuseq::cached_cu_seqlens(key);
  const cuseq::CacheStats before = cuseq::IdentityCache::instance().stats();
  std::atomic<size_t> ready = 0;
  std::vector<std::thread> threads;
  std::atomic<bool> go = false;
  for (const at::Tensor& key : keys) {
    threads.emplace_back([&, key] {
      ++ready;
      while (!go) std::this_thread::yield();
      for (int64_t i = 0; i < kHits; ++i) cuseq::cached_cu_seqlens(key);
    });
  }
  while (ready < keys.size()) std::this_thread::yield();
  const auto begun = std::chrono::steady_clock::now();
  go = true;
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  const cuseq::CacheStats after = cuseq::IdentityCache::instance().stats();
  const int64_t hits = static_cast<int64_t>(keys.size()) * kHits;
  if (after.hits - before.hits != hits) {
    std::fprintf(stderr, "these calls were not all hits\n");
    std::exit(1);
  }
  return static_cast<double>(hits) / seconds.count() / 1e6;
}

}  // namespace

int main(int argc, char** argv) {
  // As in a Python process, where a weak reference reports that a key was freed: no call has to
  // look for freed keys.
  cuseq::IdentityCache::instance().set_watcher(
      {[](const at::Tensor&) {}, [](const c10::TensorImpl*) {}});
  const c10::Device device(argc > 1 ? argv[1] : "cpu");
  const at::Tensor shared = at::tensor({2, 3}, at::kInt).to(device);
  for (const size_t threads : {1, 8}) {
    std::vector<at::Tensor> own;
    for (size_t i = 0; i < threads; ++i) own.push_back(shared.clone());
    std::printf("%zu own %.2f\n", threads, throughput(own));
    std::printf("%zu shared %.2f\n", threads, throughput(std::vector(threads, shared)));
  }
}
