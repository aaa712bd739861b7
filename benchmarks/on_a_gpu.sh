#!/usr/bin/env bash
# What a GPU can say in a quarter of an hour, on a machine with an NVIDIA card:
#
#     benchmarks/on_a_gpu.sh               # times, then tests; makes .venv-gpu
#     benchmarks/on_a_gpu.sh --times       # the times alone, three minutes
#     PYTHON=python3 benchmarks/on_a_gpu.sh    # with a Python that has jax for CUDA
#     benchmarks/on_a_gpu.sh --rehearse    # the same on a CPU with the Python at hand
#
# First the milliseconds of steps on the device. Then times a step beside optax.adamw, optax.lamb and,
# where they are installed, PyTorch's and Apex' (the environment sees the packages of the machine), and
# with each switch of its plan off. Runs the
# recorded runs of the originals and the common suite. Leaves a folder that is named for the chip in
# benchmarks/results; a rehearsal leaves it in runs. Ends with an error if a test fails.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

if [ "${1:-}" = --rehearse ]; then
  python=${PYTHON:-python3} platform=cpu results=runs
  trees=(tiny) switched=(tiny) turns=4 rounds=2 layers=1 width=32 workers=0
  suite=(tests/test_golden.py -k "timm_lamb")
  batch=8 trained=(lamb)
else
  python=${PYTHON:-.venv-gpu/bin/python} platform=cuda results=benchmarks/results
  trees=(bert-base "1.3B, stacked") switched=(bert-base small) turns=20 rounds=50 layers=12 width=768 workers=4
  suite=(tests/optimizers tests/test_golden.py tests/test_frameworks.py)
  suite+=(--ignore tests/optimizers/test_checkpoints.py)
  batch=32768 trained=(lamb muon "muon, bfloat16" muonh)
  if [ -z "${PYTHON:-}" ]; then
    python3 -m venv --system-site-packages .venv-gpu
    "$python" -m pip install --quiet --editable '.[examples,test]' 'jax[cuda12]'
  fi
fi

export PYTHONPATH=$PWD JAX_PLATFORMS=$platform,cpu TEST_DEVICES=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several share the card
[ "$platform" = cpu ] && JAX_PLATFORMS=cpu

chip=$("$python" -c 'from benchmarks.harness.machine import folder; print(folder())')
output=${OUTPUT:-$results/$chip}
mkdir -p "$output"
echo "$chip: results go to $output"

status=0
part() { # so many seconds for a benchmark; the others go on without it
  timeout "$1" "$python" -m "${@:2}" --rounds "$rounds" --output "$output" ||
    { status=1; echo "failed or took too long: ${*:2}"; }
}

part 240 benchmarks.device_time --tree "${trees[0]}" --turns "$turns"
part 300 benchmarks.step_cost --tree "${trees[@]}" --peers --bandwidth \
  --optimizer optax.adamw optax.lamb lamb lans lars adamh muon "muon, bfloat16" muonh
part 120 benchmarks.switch_times --tree "${switched[@]}" --turns "$turns" --optimizer lans muon
part 120 benchmarks.muon_step --layers "$layers" --width "$width"
part 120 benchmarks.training_step --batch "$batch" --optimizer "${trained[@]}"
part 120 benchmarks.accumulation_cost --tree "${trees[0]}"
echo "times: $((SECONDS - started)) s"
[ "${1:-}" = --times ] && exit "$status"

# A plugin for benchmarks, where it is installed, warns of parallel tests, and warnings are errors.
timeout 720 "$python" -m pytest -q -n "$workers" -p no:benchmark -m "not slow" "${suite[@]}" \
  > "$output/tests.txt" 2>&1 || status=$?
tail -n 1 "$output/tests.txt"
echo "$((SECONDS - started)) s; status $status"
exit "$status"
