#!/usr/bin/env bash
# Builds cuseq for the CPU with AddressSanitizer, runs the C++ tests and then the fuzzer, and prints
# what ran.
#   run_address_sanitizer.sh [SECONDS] [FUZZER ARGUMENT...]
# The fuzzer runs for 600 seconds, or as many as are given. Without --seed it makes other calls each
# day.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
seconds=${1:-600}
shift $(($# > 0))
build=build/asan
mkdir -p "$build"

# Leaks are not looked for, since Python and torch keep things until exit. The annotations of vectors
# are off because torch, which grows some of ours, is not instrumented. Beyond 3 GiB an allocation
# fails, as it does without AddressSanitizer when the fuzzer limits the memory.
export ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:abort_on_error=1:symbolize=1
ASAN_OPTIONS+=:allocator_may_return_null=1:max_allocation_size_mb=3072:quarantine_size_mb=64

cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DCUSEQ_CUDA=off \
  -DCUSEQ_BUILD_TESTS=ON -DCUSEQ_SANITIZE=address -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  >"$build/configure.log"
cmake --build "$build"
if [ ! -x "$build/cuseq_tests" ]; then
  echo "AddressSanitizer: LEFT OUT, GoogleTest was not found (Debian: apt-get install libgtest-dev)"
  exit 1
fi
"$build/cuseq_tests" --gtest_brief=1

rm -rf "$build/python"
mkdir "$build/python"
cp -R python/cuseq "$build/python"
rm -rf "$build"/python/cuseq/{lib,*.so}
cmake --install "$build" --prefix "$build/python/cuseq" >"$build/install.log"

# Python is not linked with AddressSanitizer, so it is loaded first, and libstdc++, whose exceptions
# it watches. Without Python's own allocator, strings and arrays are watched too.
library() {
  realpath "$(${CXX:-g++} -print-file-name="$1")"
}
seed=$((10#$(date +%j)))
LD_PRELOAD="$(library libasan.so) $(library libstdc++.so.6)" PYTHONMALLOC=malloc \
  PYTHONPATH="$build/python" "$python" -m tests.fuzz --seconds "$seconds" --seed "$seed" "$@"
echo "AddressSanitizer: the C++ tests and $seconds seconds of the fuzzer ran without a report"
