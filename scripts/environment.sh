#!/usr/bin/env bash
# Makes a virtual environment hold what cuseq is built and tested with. What is there is kept, and
# where nothing is missing nothing is fetched, so this works without a network too.
#   environment.sh VENV TORCH PACKAGE...
set -euo pipefail
venv=$1 torch=$2
shift 2

if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
python=$venv/bin/python
# A torch that is already there is the user's: it stays, whatever version this would have chosen.
if ! "$python" -c 'import torch' 2>/dev/null; then
  "$python" -m pip install -q "$torch" numpy
fi
installed=$("$python" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])')
"$python" -m pip install -q --disable-pip-version-check "$installed" "$@"

# The C++ tests want GoogleTest; without it the test summary says that they were left out.
if ! ls /usr/lib/*/cmake/GTest /usr/local/lib*/cmake/GTest /usr/lib*/cmake/GTest >/dev/null 2>&1 &&
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get install -y -qq libgtest-dev >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq libgtest-dev; } >/dev/null 2>&1 || true
fi

# A GPU and a CUDA torch, but no compiler: it comes as Python packages that match torch's CUDA.
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
