#!/usr/bin/env bash
# Runs one of the tests marked `full`, chosen by the day of the year, so that each gets its turn.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
mapfile -t tests < <("$python" -m pytest -q --collect-only -m full tests/python | grep :: || true)
if [ ${#tests[@]} -eq 0 ]; then
  echo "No test is marked full."
  exit
fi
turn=$((10#$(date +%j) % ${#tests[@]}))
echo "full tier, test $((turn + 1)) of ${#tests[@]}: ${tests[turn]}"
PATH="$(dirname "$(realpath -s "$python")"):$PATH" "$python" -m pytest -q "${tests[turn]}"
