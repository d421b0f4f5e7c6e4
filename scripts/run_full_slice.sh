#!/usr/bin/env bash
# Runs a seventh of the tests marked `full`, chosen by the day, so that each gets its turn in a week.
#   run_full_slice.sh [SECONDS]
# After SECONDS no test is begun; how many are left out is said, and another part of the slice comes
# first in another week.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
slices=7
day=$(($(date +%s) / 86400))
slice=$((day % slices))
mapfile -t tests < <("$python" -m pytest -q --collect-only -m full tests/python | grep :: |
  awk -v slices=$slices -v slice=$slice 'NR % slices == slice')
count=${#tests[@]}
if [ "$count" -eq 0 ]; then
  echo "No test is marked full."
  exit 1
fi
first=$((day / slices * 37 % count))
tests=("${tests[@]:first}" "${tests[@]:0:first}")
if [ -n "${1:-}" ]; then
  CUSEQ_TESTS_UNTIL=$(($(date +%s) + $1))
  export CUSEQ_TESTS_UNTIL
fi
echo "full tier, slice $((slice + 1)) of $slices: $count tests${1:+, $1 seconds}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=1
PATH="$(dirname "$(realpath -s "$python")"):$PATH" "$python" -m pytest -q -rs -n "$(nproc)" \
  --dist worksteal "${tests[@]}"
