#!/usr/bin/env bash
# Builds cuseq with its C++ tests and installs it, editable, into an environment that environment.sh
# made. With a GPU but no nvcc, installs nvcc first; with neither, leaves the CUDA kernels out.
#   build.sh PYTHON [PIP OPTION...]
# Environment, optional: CUSEQ_CUDA, CUSEQ_CUDA_ARCHS, MAX_JOBS, as in a build by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

if [ -z "${CUSEQ_CUDA:-}" ]; then
  facts=$("$python" cmake/torch_info.py)
  fact() {
    "$python" -c "import json, sys; print(json.load(sys.stdin)['$1'])" <<<"$facts"
  }
  if [ -n "$(fact cuda)" ] && [ -z "$(fact nvcc)" ]; then
    read -ra packages <<<"$(fact nvcc_packages)"
    if [ -z "$(fact gpu_archs)" ]; then
      echo "cuseq: no GPU and no nvcc here, so it is built without CUDA kernels (CUSEQ_CUDA=off)"
      export CUSEQ_CUDA=off
    elif [ ${#packages[@]} -gt 0 ]; then
      "$python" -m pip install -q "${packages[@]}"
    fi # else the build stops and says which toolkit to install
  fi
fi
CUSEQ_BUILD_TESTS=ON "$python" -m pip install "$@" --no-build-isolation --no-deps -e .
