#!/usr/bin/env bash
# Runs a seventh of the tests marked `full`, chosen by the day, so that each gets its turn in a week.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
slices=7
slice=$((10#$(date +%j) % slices))
mapfile -t tests < <("$python" -m pytest -q --collect-only -m full tests/python | grep :: |
  awk -v slices=$slices -v slice=$slice 'NR % slices == slice')
if [ ${#tests[@]} -eq 0 ]; then
  echo "No test is marked full."
  exit 1
fi
echo "full tier, slice $((slice + 1)) of $slices: ${#tests[@]} tests"
PATH="$(dirname "$(realpath -s "$python")"):$PATH" "$python" -m pytest -q "${tests[@]}"
