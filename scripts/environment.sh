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
