#!/usr/bin/env bash
# Builds cuseq for the CPU with ThreadSanitizer, runs the C++ tests of the identity cache and prints
# what ran.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=build/tsan
mkdir -p "$build"

cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DCUSEQ_CUDA=off \
  -DCUSEQ_BUILD_PYTHON=OFF -DCUSEQ_BUILD_TESTS=ON -DCUSEQ_SANITIZE=thread \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo >"$build/configure.log"
cmake --build "$build" --target cuseq_tests
if [ ! -x "$build/cuseq_tests" ]; then
  echo "ThreadSanitizer: LEFT OUT, GoogleTest was not found (Debian: apt-get install libgtest-dev)"
  exit 1
fi

# torch is not instrumented, so ThreadSanitizer cannot judge synchronisation inside its libraries,
# the deregistration of our ops from its dispatcher at exit, or the last release of a tensor or
# storage, whose reference count both sides change. Suppress reports about these.
cat >"$build/suppressions" <<'END'
called_from_lib:libtorch_cpu.so
called_from_lib:libc10.so
called_from_lib:libgomp
mutex:c10::RegistrationHandleRAII
race:release_resources_and_decrement_weakrefs_
race:c10::weak_intrusive_ptr*::reset_
END
# ThreadSanitizer's shadow memory needs address space layout randomisation turned off.
TSAN_OPTIONS="suppressions=$build/suppressions exitcode=66" \
  setarch "$(uname -m)" -R "$build/cuseq_tests" --gtest_filter='Cache.*'
echo "ThreadSanitizer: the C++ tests of the cache ran without a report"
