#!/usr/bin/env bash
# Runs all tests, GoogleTest then pytest, and prints what ran and what was left out, and why.
#   run_tests.sh [PYTEST ARGUMENT...]
# Environment, all optional:
#   PYTHON                the interpreter with cuseq (python3)
#   JOBS                  processes that run Python tests, one file at a time (cores, at most 8)
#   CUSEQ_BUILD_DIR       where setup.py built the C++ tests (build)
#   CUSEQ_TEST_UNSLOTH=1  fetch unsloth, which is LGPL and AGPL, and test against it
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
cores=$(nproc)
jobs=${JOBS:-$((cores < 8 ? cores : 8))}
# In a virtual machine AMX instructions may trap although the processor reports AMX.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
failed=0

tag=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
binary=${CUSEQ_BUILD_DIR:-build}/$tag/cuseq_tests
if [ -x "$binary" ]; then
  "$binary" --gtest_brief=1 || failed=1
  cpp="C++ tests: ran"
else
  cpp="C++ tests: LEFT OUT, GoogleTest was not found (Debian: apt-get install libgtest-dev)"
fi

if [ "${CUSEQ_TEST_UNSLOTH:-}" = 1 ]; then
  PYTHON=$python bash scripts/fetch_unsloth.sh --whole || failed=1
fi
unsloth="tests against unsloth: ran"
if ! compgen -G "build/oracles/unsloth-*" >/dev/null && [ -z "${CUSEQ_UNSLOTH:-}" ]; then
  unsloth="tests against unsloth: LEFT OUT, CUSEQ_TEST_UNSLOTH=1 fetches it (LGPL, AGPL)"
fi

# Each process has one thread: more would take turns on the same cores.
if [ "$jobs" -gt 1 ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=1
fi
"$python" -m pytest -q -n "$jobs" --dist loadfile "$@" || failed=1

echo "$cpp"
echo "$unsloth"
"$python" - <<'PY'
import cuseq, torch

info = cuseq.build_info()
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
kernels = f"built for {info['cuda_archs']}" if info["cuda"] else "not built"
print(f"CUDA kernels: {kernels}; " + (f"ran on {gpu}" if gpu else "not run, no GPU here"))
print(f"cuseq with torch {torch.__version__}")
PY
exit $failed
