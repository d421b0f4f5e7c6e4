#!/usr/bin/env bash
# Runs all tests, GoogleTest then pytest, and prints what ran and what was left out, and why.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# In a virtual machine AMX instructions may trap although the processor reports AMX.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
failed=0

tag=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
binary=build/$tag/cuseq_tests
if [ -x "$binary" ]; then
  "$binary" --gtest_brief=1 || failed=1
  cpp="C++ tests: ran"
else
  cpp="C++ tests: LEFT OUT, GoogleTest was not found (Debian: apt-get install libgtest-dev)"
fi

"$python" -m pytest -q "$@" || failed=1

echo "$cpp"
"$python" - <<'PY'
import cuseq, torch

info = cuseq.build_info()
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
kernels = f"built for {info['cuda_archs']}" if info["cuda"] else "not built"
print(f"CUDA kernels: {kernels}; " + (f"ran on {gpu}" if gpu else "not run, no GPU here"))
print(f"cuseq with torch {torch.__version__}")
PY
exit $failed
