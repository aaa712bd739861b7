#!/usr/bin/env bash
# Everything that a GPU can say in half an hour, on a machine with an NVIDIA card:
#
#     benchmarks/on_a_gpu.sh               # at most 28 minutes; makes .venv-gpu
#     benchmarks/on_a_gpu.sh --rehearse    # the same on a CPU with the Python at hand: a few minutes
#
# Runs the recorded runs of the originals and the common suite, and times a step beside
# optax.adamw, optax.lamb and, where they are installed, PyTorch's and Apex' (the environment sees
# the packages of the machine). Leaves a folder that is named for the chip in benchmarks/results;
# a rehearsal leaves it in runs. Ends with an error if a test fails.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

if [ "${1:-}" = --rehearse ]; then
  python=${PYTHON:-python3} platform=cpu results=runs
  trees=(tiny) rounds=2 layers=1 width=32 workers=0 suite=(tests/test_golden.py -k "timm_lamb")
  batch=8 trained=(lamb)
else
  python=.venv-gpu/bin/python platform=cuda results=benchmarks/results
  trees=(bert-base bert-large small) rounds=50 layers=12 width=768 workers=4
  suite=(tests/optimizers tests/test_golden.py tests/test_frameworks.py)
  suite+=(--ignore tests/optimizers/test_checkpoints.py)
  batch=32768 trained=(lamb muon "muon, bfloat16" muonh)
  python3 -m venv --system-site-packages .venv-gpu
  "$python" -m pip install --quiet --editable '.[examples,test]' 'jax[cuda12]'
fi

export PYTHONPATH=$PWD JAX_PLATFORMS=$platform,cpu TEST_DEVICES=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several share the card
[ "$platform" = cpu ] && JAX_PLATFORMS=cpu

chip=$("$python" -c 'import jax; print("-".join(jax.devices()[0].device_kind.lower().split()))')
output=${OUTPUT:-$results/$chip}
mkdir -p "$output"
echo "$chip: results go to $output"

status=0
timeout 720 "$python" -m pytest -q -n "$workers" -m "not slow" "${suite[@]}" \
  > "$output/tests.txt" 2>&1 || status=$?
tail -n 1 "$output/tests.txt"

timeout 540 "$python" -m benchmarks.step_cost --tree "${trees[@]}" --rounds "$rounds" \
  --optimizer optax.adamw optax.lamb lamb lans lars adamh muon "muon, bfloat16" muonh \
  --peers --bandwidth --output "$output"
timeout 120 "$python" -m benchmarks.training_step --batch "$batch" --rounds "$rounds" \
  --optimizer "${trained[@]}" --output "$output"
timeout 180 "$python" -m benchmarks.accumulation_cost --tree "${trees[0]}" --rounds "$rounds" \
  --output "$output"
timeout 120 "$python" -m benchmarks.muon_step --layers "$layers" --width "$width" \
  --rounds "$rounds" --output "$output"

echo "$((SECONDS - started)) s; tests ended with status $status"
exit "$status"
