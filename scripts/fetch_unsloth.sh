#!/usr/bin/env bash
# Fetches what cuseq.integrations.unsloth is compared with, from the package registry: unsloth's own
# packing.py, or with --whole the packages, which import on a CPU beside the tests' environment. It
# is LGPL and AGPL: build/ is ignored by git, and nothing of it belongs in this repository. What is
# there already is kept.
#   fetch_unsloth.sh [--whole] [FOLDER]      default: build/oracles/unsloth-2026.10.9
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
version=2026.10.9
wanted=(unsloth/utils/packing.py)
packages=("unsloth==$version")
if [ "${1:-}" = --whole ]; then
  wanted=({unsloth,unsloth_zoo}-$version.dist-info unsloth unsloth_zoo unsloth_zoo_downloads)
  packages+=("unsloth_zoo==$version")
  shift
fi
folder=${1:-$root/build/oracles/unsloth-$version}

# The last of them is the last that is unpacked.
if [ -e "$folder/${wanted[-1]}" ]; then
  echo "unsloth $version: $folder has it"
  exit
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
  -d "$wheels" "${packages[@]}"
mkdir -p "$folder"
"$python" - "$wheels" "$folder" "${wanted[@]}" <<'PY'
import sys
from pathlib import Path
from zipfile import ZipFile

wheels, folder, *wanted = sys.argv[1:]
for wheel in sorted(Path(wheels).glob("*.whl")):
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            # The wheel's web app, which is most of it, stays where it is.
            if name in wanted or name.split("/")[0] in wanted:
                archive.extract(name, folder)
PY
echo "unsloth $version: ${wanted[*]} in $folder"
