#!/usr/bin/env bash
# Creates a virtual environment and installs what cuseq is built and tested with: the requirements that
# it is given, and those beside them in versions.json. Keeps installed packages and fetches only missing
# ones, so it needs no network if nothing is missing.
#   environment.sh VENV TORCH REQUIREMENT...
# Environment, all optional:
#   PYTHON   the interpreter to make the environment of (python3)
#   INSTALL  the command that installs into it (its own pip)
set -euo pipefail
venv=$1 torch=$2
shift 2

if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
python=$venv/bin/python
install=("$python" -m pip install --disable-pip-version-check)
[ -z "${INSTALL:-}" ] || read -ra install <<<"$INSTALL"
beside=$("$python" "$(dirname "$0")/matrix.py" beside "$@")
mapfile -t beside <<<"$beside"
# Keep a torch that is already installed, whatever its version: the user chose it.
if ! "$python" -c 'import torch' 2>/dev/null; then
  "${install[@]}" -q "$torch" numpy
fi
installed=$("$python" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])')
"${install[@]}" -q "$installed" "$@" "${beside[@]}"

# The C++ tests need GoogleTest; without it the test summary says that they were left out.
if ! ls /usr/lib/*/cmake/GTest /usr/local/lib*/cmake/GTest /usr/lib*/cmake/GTest >/dev/null 2>&1 &&
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get install -y -qq libgtest-dev >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq libgtest-dev; } >/dev/null 2>&1 || true
fi
