#!/usr/bin/env bash
# Builds cuseq on a machine with a GPU, then runs its tests, sanitizers and benchmarks there.
#
#   bash benchmarks/device.sh                    all stages
#   bash benchmarks/device.sh build test         the named ones: build test sanitize racecheck fuzz
#                                                bench example
#
# A failed step does not stop the next. The last lines are a table of all steps, and the exit status
# tells whether one failed. Without a GPU a reduced run uses the CPU.
#
# Environment, all optional:
#   PYTHON    the interpreter with torch (python3)
#   OUT       a folder for few files: receives results.tar.gz, summary.txt and, as tests fail,
#             failures.txt; without it, results go to benchmarks/results/DATE
#   BENCHES   benchmarks of the bench stage (metadata cache attention rope masks conv thd tree
#             training_step);
#             others, of up to 10 minutes each: unsloth, training_turns, attention_backends,
#             families, bits, trl, and with several GPUs cp_attention, graphed_ranks and
#             train_ranks
#   PEERS     the folder with the peers' packages, for rope, masks, training_step and unsloth
#   (.peers);
#             benchmarks/peers.txt says how to fill it
#   TOKENS    row lengths of the training step (the benchmark's default)
#   TESTS     test files for test, sanitize and racecheck, as globs under tests/python (all that the
#             stage can use); splits a suite that is too long for one call
#   MARK      the mark expression of stage test ("not full")
#   JOBS      processes that test at the same time (all cores but one with a GPU, else 1)
#   FUZZ_SECONDS, FUZZ_SEED  duration and first seed of the fuzzer (300 with a GPU, else 30; 0)
#   CUSEQ_COMMIT  the commit to name in the results if there is no .git
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin"
known=(build test sanitize racecheck fuzz bench example)
stages=("$@")
[[ $# -gt 0 ]] || stages=("${known[@]}")
for stage in "${stages[@]}"; do
  if [[ " ${known[*]} " != *" $stage "* ]]; then
    echo "unknown stage '$stage': must be one of ${known[*]}" >&2
    exit 2
  fi
done
read -ra benches <<<"${BENCHES:-metadata cache attention rope masks conv thd tree training_step}"
read -ra tokens <<<"${TOKENS:-}"

# Tests of the kernels that use shared memory or cub, the only kernels that racecheck can check:
# scan_lengths, token_metadata, cu_seqlens_from_position_ids (metadata, layout, values_on_device),
# lengths_from_padding_mask, mask_rows (padding_mask_layouts, padded_segments), masks (masks,
# block_masks, cache_masks), apply_rope, apply_qk_norm_rope (rope, rope_autograd, qk_norm_rope),
# causal_conv1d (conv).
shared_memory="layout/test_*.py masks/test_masks.py masks/test_block_masks.py
  cache/test_cache_masks.py ops/test_values_on_device.py rope/test_rope.py
  rope/test_rope_autograd.py rope/test_qk_norm_rope.py recurrent/test_conv.py"

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
cores=$(nproc)
jobs=1
[[ $gpu == no ]] || jobs=$((cores < 3 ? 1 : cores - 1))
export JOBS=${JOBS:-$jobs}
threads=()
# One thread for each process: more would take turns on the same cores.
[[ $JOBS -eq 1 ]] || threads=(OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1)

# Installs the package into $PYTHON's environment; cuseq_tests stays in the build folder.
build_cuseq() {
  bash scripts/build.sh "$PYTHON" -v || return
  "$PYTHON" -c 'import cuseq; print(cuseq.build_info())'
}
export -f build_cuseq

# Prints the table of steps so far.
summary() {
  printf '\n%-24s %-10s %8s\n' step result seconds
  printf '%s\n' "${rows[@]}"
}

# Saves the results so far, in case the machine stops the script.
keep() {
  summary >"$results/summary.txt"
  if [[ -n ${OUT:-} ]]; then
    tar -czf "$OUT/results.tar.gz.part" -C "$results" . &&
      mv "$OUT/results.tar.gz.part" "$OUT/results.tar.gz"
    cp "$results/summary.txt" "$OUT/summary.txt"
  fi
}

# note NAME RESULT SECONDS: adds one line to the table.
note() {
  rows+=("$(printf '%-24s %-10s %8s' "$1" "$2" "$3")")
  keep
}

# step NAME LIMIT COMMAND...: runs COMMAND with a time limit in seconds, its output in NAME.log.
step() {
  local name=$1 limit=$2 log=$results/$1.log begun=$SECONDS status result
  # In $OUT while it runs, so that the log survives if the machine stops the script.
  local running=${OUT:-$results}/running.log
  shift 2
  printf '\n=== %s (at most %s s): %s\n' "$name" "$limit" "$*"
  # After an interrupt pytest still says what has failed so far.
  timeout --signal=INT --kill-after=15 "$limit" "$@" >"$running" 2>&1
  status=$?
  mv "$running" "$log"
  case $status in
    0) result=passed ;;
    124 | 137) result='TIMED OUT' ;;
    *) result=FAILED ;;
  esac
  # Some virtual machines block compute-sanitizer; that is not a failure of the code.
  if [[ $result == FAILED && $name =~ ^(sanitize|racecheck) ]] &&
    grep -q 'Device not supported' "$log"; then
    result=refused
    echo "compute-sanitizer does not run on this machine: Device not supported"
  fi
  tail -n "$([[ $result == passed || $result == refused ]] && echo 25 || echo 40)" "$log"
  [[ $result == passed || $result == refused ]] || failures=$((failures + 1))
  note "$name" "$result" $((SECONDS - begun))
}

# Prints the path of the C++ tests' program, or nothing.
cpp_tests() {
  find build/python* -type f -name cuseq_tests -perm -u+x 2>/dev/null | head -n 1
}

stage_build() {
  step build 500 bash -c build_cuseq
}

# python_tests FILES PYTEST...: runs a pytest command over each file in a process of its own, $JOBS
# at a time, the largest first; prints failures and sums at the end. FILES are globs under
# tests/python. Fails if a file failed.
python_tests() {
  local files status all
  all=$(mktemp)
  # shellcheck disable=SC2086
  files=$(cd tests/python && ls -S $1) || return
  shift
  # Exit status 5: none of the file's tests was selected.
  # shellcheck disable=SC2016
  xargs -P "$JOBS" -I{} bash -c '
    file=tests/python/$1 log=$(mktemp)
    "${@:2}" "$file" >"$log" 2>&1
    status=$?
    cat "$log"
    echo "$file: exit status $status"
    rm "$log"
    [[ $status -eq 0 || $status -eq 5 ]]' _ {} "$@" <<<"$files" | tee "$all"
  status=${PIPESTATUS[0]}
  grep -E '^(FAILED|ERROR) |: exit status ([1-46-9]|..)' "$all"
  grep -oE '[0-9]+ (passed|failed|skipped|errors?|deselected)\b' "$all" |
    awk '{ sum[$2] += $1 } END { for (kind in sum) printf "%d %s  ", sum[kind], kind; print "" }'
  rm "$all"
  return "$status"
}
export -f python_tests

stage_test() {
  local program
  program=$(cpp_tests)
  if [[ -n $program ]]; then
    step test-cpp 200 "$program" --gtest_brief=1
  else
    echo "There is no cuseq_tests (GoogleTest was not found): the C++ tests are left out."
    note test-cpp 'LEFT OUT' 0
  fi
  local files only=()
  # shellcheck disable=SC2086
  mapfile -t files < <(cd tests/python && ls ${TESTS:-*/test_*.py})
  if [[ ${#files[@]} -eq 0 ]]; then
    echo "TESTS must name files under tests/python, got '$TESTS'" >&2
    failures=$((failures + 1))
    note test-python FAILED 0
    return
  fi
  [[ $gpu == no ]] || only=(--gpu-only)  # the other tests do not depend on the machine
  step test-python 560 env "${threads[@]}" "$PYTHON" -m pytest -q -ra -m "${MARK:-not full}" \
    --durations=25 -n "$JOBS" --dist loadgroup "${only[@]}" --failures="${OUT:-$results}/failures.txt" \
    "${files[@]/#/tests/python/}"
}

# check_memory NAME FILES TOOL...: runs a tool of compute-sanitizer over the C++ tests and the
# Python tests that launch kernels.
check_memory() {
  local name=$1 files=$2 program
  shift 2
  if [[ $gpu == no ]] || ! command -v compute-sanitizer >/dev/null; then
    echo "No GPU or no compute-sanitizer: nothing to check."
    note "$name" 'LEFT OUT' 0
    return
  fi
  # Without torch's caching allocator every tensor is its own allocation, so overruns show.
  local check=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 86 "$@")
  program=$(cpp_tests)
  if [[ -n $program ]]; then
    step "$name-cpp" 250 "${check[@]}" "$program"
  else
    note "$name-cpp" 'LEFT OUT' 0
  fi
  step "$name-python" 560 env "${threads[@]}" bash -c 'python_tests "$@"' _ "${TESTS:-$files}" \
    "${check[@]}" "$PYTHON" -m pytest -q -m kernels
}

stage_sanitize() {
  # API errors are not checked here: torch probes the driver with calls that are meant to fail.
  check_memory sanitize '*/test_*.py' --tool memcheck --report-api-errors no
}

stage_racecheck() {
  # Kernels of torch are left out; the option's name depends on the release of the sanitizer.
  local only
  only=$(compute-sanitizer --help 2>/dev/null | grep -oE -m1 -- '--kernel-(name|regex)\b' | head -n 1)
  check_memory racecheck "$shared_memory" --tool racecheck ${only:+"$only" kns=cuseq}
}

stage_fuzz() {
  local device=cpu seconds=${FUZZ_SECONDS:-30}
  if [[ $gpu == yes ]]; then
    device=cuda seconds=${FUZZ_SECONDS:-300}
  fi
  step fuzz $((seconds + 120)) "$PYTHON" -m tests.fuzz --seconds "$seconds" \
    --seed "${FUZZ_SEED:-0}" --device "$device"
}

stage_bench() {
  local name options limit
  for name in "${benches[@]}"; do
    options=(--out "$results")
    limit=120
    [[ $name == rope ]] && limit=240
    [[ $name == masks ]] && limit=200
    [[ $name == tree || $name == conv ]] && limit=200
    [[ $name =~ ^(unsloth|training_turns|attention_backends|cp_attention|graphed_ranks|train_ranks|trl)$ ]] && limit=560
    [[ $name != attention_backends ]] || options+=(--table python/cuseq/attention/table.csv)
    if [[ $name == training_step ]]; then
      limit=560
      [[ ${#tokens[@]} -eq 0 ]] || options+=(--tokens "${tokens[@]}")
    fi
    step "bench-$name" "$limit" "$PYTHON" "benchmarks/bench_$name.py" "${options[@]}"
  done
}

stage_example() {
  step example 400 "$PYTHON" examples/compare.py --out "$results/example"
}

for stage in "${stages[@]}"; do
  "stage_$stage"
done
summary
echo "results: ${OUT:-$results}"
[[ $failures -eq 0 ]]
