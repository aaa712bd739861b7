#!/usr/bin/env bash
# The searches of benchmarks.tuned and what a law costs, on one GPU: a process for each network and
# optimizer, side by side. Results go to the folder of the chip. An H100 took ten minutes for all of
# the BERT and the searches of the causal model.
#
#     PYTHON=python3 benchmarks/evidence_on_a_gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} programs=$(mktemp -d)
export PYTHONPATH=$PWD XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}" # small products
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$programs}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

piece() { # of one network and optimizer
  "$python" -m benchmarks.tuned --keep --workload "$1" --optimizer "$2"
  "$python" -m benchmarks.transfer --keep --workload "$1" --optimizer "$2"
}

for optimizer in muonh muon adamw lans lamb; do
  for workload in bert causal; do
    piece "$workload" "$optimizer" &
  done
done
for _ in {1..10}; do wait -n; done # one after the other: a failure of one ends the script
