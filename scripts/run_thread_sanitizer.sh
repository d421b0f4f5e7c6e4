#!/usr/bin/env bash
# Builds the CPU half of cuseq with ThreadSanitizer and runs the C++ tests of the identity cache.
# Ends with what ran.
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

# torch itself is not instrumented: what its libraries do among themselves cannot be judged here,
# nor how its dispatcher takes leave of ours at exit, nor the last release of a tensor or storage,
# whose reference count is half theirs.
cat >"$build/suppressions" <<'END'
called_from_lib:libtorch_cpu.so
called_from_lib:libc10.so
called_from_lib:libgomp
mutex:c10::RegistrationHandleRAII
race:release_resources_and_decrement_weakrefs_
race:c10::weak_intrusive_ptr*::reset_
END
# Its shadow memory needs the addresses where they lie without randomisation.
TSAN_OPTIONS="suppressions=$build/suppressions exitcode=66" \
  setarch "$(uname -m)" -R "$build/cuseq_tests" --gtest_filter='Cache.*'
echo "ThreadSanitizer: the C++ tests of the cache ran without a report"
