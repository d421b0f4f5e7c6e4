#!/usr/bin/env bash
# Runs a seventh of the tests marked `full`, chosen by the day, so that each gets its turn in a week.
#   run_full_slice.sh [SECONDS]
# After SECONDS no test is begun, and those that are left are counted as skipped.
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
if [ -n "${1:-}" ]; then
  CUSEQ_TESTS_UNTIL=$(($(date +%s) + $1))
  export CUSEQ_TESTS_UNTIL
fi
echo "full tier, slice $((slice + 1)) of $slices: ${#tests[@]} tests${1:+, $1 seconds}"
PATH="$(dirname "$(realpath -s "$python")"):$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
  "$python" -m pytest -q -n "$(nproc)" --dist worksteal "${tests[@]}"
