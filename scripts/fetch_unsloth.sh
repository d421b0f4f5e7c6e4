#!/usr/bin/env bash
# Fetches the reference that the tests compare cuseq.integrations.unsloth with, from the package
# registry: unsloth's packing.py or, with --whole, the packages unsloth and unsloth_zoo, which can
# be imported on a CPU with the packages of the tests' environment. They are LGPL and AGPL, so no
# part of them may enter this repository: they go to build/, which git ignores. Existing files are
# kept.
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

# The last entry is unpacked last, so if it exists, all do.
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
            # Skip the wheel's web app, which makes up most of it.
            if name in wanted or name.split("/")[0] in wanted:
                archive.extract(name, folder)
PY
echo "unsloth $version: ${wanted[*]} in $folder"
