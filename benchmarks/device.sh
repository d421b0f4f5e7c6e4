#!/usr/bin/env bash
# Builds cuseq on a machine with a GPU and runs everything that proves it there.
#
#   bash benchmarks/device.sh                    all stages
#   bash benchmarks/device.sh build test         the named ones: build test sanitize bench example
#
# A failed step does not stop the next; the last lines are a table of all steps, and the exit status
# says whether one failed. Without a GPU the same runs on the CPU, reduced.
#
# Environment, all optional:
#   PYTHON    the interpreter with torch (python3)
#   OUT       a folder that takes at most a few files: gets results.tar.gz and summary.txt; without
#             it, results go to benchmarks/results/DATE
#   BENCHES   benchmarks of the bench stage (metadata cache attention rope masks thd training_step);
#             unsloth is another, of nearly 10 minutes
#   PEERS     the folder with the peers' packages, for rope, masks, training_step and unsloth (.peers):
#             benchmarks/peers.txt says how to fill it
#   TOKENS    row lengths of the training step (the benchmark's own choice)
#   CUSEQ_COMMIT  the commit to name in the results, where there is no .git
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin"
stages=("$@")
[[ $# -gt 0 ]] || stages=(build test sanitize bench example)
for stage in "${stages[@]}"; do
  if [[ ! $stage =~ ^(build|test|sanitize|bench|example)$ ]]; then
    echo "unknown stage '$stage': must be build, test, sanitize, bench or example" >&2
    exit 2
  fi
done
read -ra benches <<<"${BENCHES:-metadata cache attention rope masks thd training_step}"
read -ra tokens <<<"${TOKENS:-}"

stamp=$(date +%Y-%m-%d-%H%M%S)
if [[ -n ${OUT:-} ]]; then
  results=$(mktemp -d)
else
  results=$PWD/benchmarks/results/$stamp
fi
mkdir -p "$results"
rows=()
failures=0

if nvidia-smi -L >/dev/null 2>&1; then
  gpu=yes
  export CUSEQ_REQUIRE_CUDA=1
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
else
  gpu=no
  echo "No GPU here: tests skip what needs one, benchmarks run reduced on the CPU."
fi

# The package into $PYTHON's environment; cuseq_tests stays in the build folder.
build_cuseq() {
  CUSEQ_BUILD_TESTS=ON "$PYTHON" -m pip install --no-build-isolation --no-deps -v -e . || return
  "$PYTHON" -c 'import cuseq; print(cuseq.build_info())'
}
export -f build_cuseq

# Prints the table of steps so far.
summary() {
  printf '\n%-24s %-10s %8s\n' step result seconds
  printf '%s\n' "${rows[@]}"
}

# Keeps what there is so far, in case the machine stops the script.
keep() {
  summary >"$results/summary.txt"
  if [[ -n ${OUT:-} ]]; then
    tar -czf "$OUT/results.tar.gz.part" -C "$results" . &&
      mv "$OUT/results.tar.gz.part" "$OUT/results.tar.gz"
    cp "$results/summary.txt" "$OUT/summary.txt"
  fi
}

# note NAME RESULT SECONDS: one line of the table.
note() {
  rows+=("$(printf '%-24s %-10s %8s' "$1" "$2" "$3")")
  keep
}

# step NAME LIMIT COMMAND...: runs it with a time limit in seconds, its output in NAME.log.
step() {
  local name=$1 limit=$2 log=$results/$1.log begun=$SECONDS status result
  # In $OUT while it runs, so that the log survives if the machine stops the script.
  local running=${OUT:-$results}/running.log
  shift 2
  printf '\n=== %s (at most %s s): %s\n' "$name" "$limit" "$*"
  timeout --kill-after=10 "$limit" "$@" >"$running" 2>&1
  status=$?
  mv "$running" "$log"
  case $status in
    0) result=passed ;;
    124 | 137) result='TIMED OUT' ;;
    *) result=FAILED ;;
  esac
  # compute-sanitizer cannot run on every virtual machine; that is no fault of the code.
  if [[ $result == FAILED && $name == sanitize* ]] && grep -q 'Device not supported' "$log"; then
    result=refused
    echo "compute-sanitizer does not run on this machine: Device not supported"
  fi
  tail -n "$([[ $result == passed || $result == refused ]] && echo 25 || echo 40)" "$log"
  [[ $result == passed || $result == refused ]] || failures=$((failures + 1))
  note "$name" "$result" $((SECONDS - begun))
}

# The C++ tests' program, or nothing.
cpp_tests() {
  find build -type f -name cuseq_tests -perm -u+x 2>/dev/null | head -n 1
}

stage_build() {
  step build 500 bash -c build_cuseq
}

stage_test() {
  local program
  program=$(cpp_tests)
  if [[ -n $program ]]; then
    step test-cpp 200 "$program" --gtest_brief=1
  else
    echo "There is no cuseq_tests (GoogleTest was not found): the C++ tests are left out."
    note test-cpp 'LEFT OUT' 0
  fi
  step test-python 500 "$PYTHON" -m pytest tests/python -q -ra --durations=10
}

stage_sanitize() {
  if [[ $gpu == no ]] || ! command -v compute-sanitizer >/dev/null; then
    echo "No GPU or no compute-sanitizer: nothing to check."
    note sanitize 'LEFT OUT' 0
    return
  fi
  # API errors are left to the tests: torch probes the driver with calls that are meant to fail.
  # Without torch's caching allocator every tensor is an allocation of its own, so overruns show.
  local check=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck
    --report-api-errors no --error-exitcode 86)
  local program
  program=$(cpp_tests)
  if [[ -n $program ]]; then
    step sanitize-cpp 250 "${check[@]}" "$program"
  else
    note sanitize-cpp 'LEFT OUT' 0
  fi
  step sanitize-python 500 "${check[@]}" "$PYTHON" -m pytest tests/python -q -m kernels
}

stage_bench() {
  local name options limit
  for name in "${benches[@]}"; do
    options=(--out "$results")
    limit=120
    [[ $name == rope ]] && limit=240
    [[ $name == masks ]] && limit=200
    [[ $name == unsloth ]] && limit=560
    if [[ $name == training_step ]]; then
      limit=560
      [[ ${#tokens[@]} -eq 0 ]] || options+=(--tokens "${tokens[@]}")
    fi
    step "bench-$name" "$limit" "$PYTHON" "benchmarks/bench_$name.py" "${options[@]}"
  done
}

stage_example() {
  step example 400 "$PYTHON" examples/train.py --out "$results/example"
}

for stage in "${stages[@]}"; do
  "stage_$stage"
done
summary
echo "results: ${OUT:-$results}"
[[ $failures -eq 0 ]]
