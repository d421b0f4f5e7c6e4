#!/usr/bin/env bash
# Creates a virtual environment and installs what cuseq is built and tested with. Keeps installed
# packages and fetches only missing ones, so it needs no network if nothing is missing.
#   environment.sh VENV TORCH PACKAGE...
set -euo pipefail
venv=$1 torch=$2
shift 2

if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
python=$venv/bin/python
# Keep a torch that is already installed, whatever its version: the user chose it.
if ! "$python" -c 'import torch' 2>/dev/null; then
  "$python" -m pip install -q "$torch" numpy
fi
installed=$("$python" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])')
"$python" -m pip install -q --disable-pip-version-check "$installed" "$@"

# The C++ tests need GoogleTest; without it the test summary says that they were left out.
if ! ls /usr/lib/*/cmake/GTest /usr/local/lib*/cmake/GTest /usr/lib*/cmake/GTest >/dev/null 2>&1 &&
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get install -y -qq libgtest-dev >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq libgtest-dev; } >/dev/null 2>&1 || true
fi

# With a GPU and a CUDA build of torch but no nvcc, install nvcc from Python packages that match
# torch's CUDA version.
toolkit=$("$python" - <<'PY'
import shutil, sys
from pathlib import Path
import torch

cuda = torch.version.cuda
nvcc = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
beside = Path(torch.__file__).parent.parent / "nvidia"
if cuda and torch.cuda.is_available() and not nvcc and not list(beside.glob("*/bin/nvcc")):
    print(cuda)
PY
)
case $toolkit in
  "") ;;
  1[0-2].*)
    echo "cuseq: this GPU needs nvcc of CUDA $toolkit, which is no Python package: install the toolkit and put nvcc on PATH" >&2
    exit 1
    ;;
  *)
    "$python" -m pip install -q "nvidia-cuda-nvcc==$toolkit.*" "nvidia-cuda-crt==$toolkit.*" \
      "nvidia-nvvm==$toolkit.*" "nvidia-cuda-cccl==$toolkit.*"
    ;;
esac
