"""The process of a configuration: `python -m benchmarks.versions.worker ROOT TREE OPTIMIZER`.

A fourth argument is a trick to take out of the library. It compiles the optimizer's step and
AdamW's, says so, and takes a turn for every line that it is sent; its answers are lines of JSON.
The library is that of ROOT; what measures it is in this tree for all of them. It imports nothing of
the library before it knows where from.
"""

import importlib
import json
import os
from pathlib import Path
import queue
import statistics
import sys
import threading
from typing import Any

STEPS = 3  # of each optimizer in a turn, of which the median counts


def take_library_of(root: Path) -> None:
    """Imports the library from there, and nothing else: old versions have benchmarks, too."""
    sys.path.insert(0, str(root))
    library = importlib.import_module("optax_largebatch")
    sys.path.remove(str(root))
    taken = Path(str(library.__file__)).resolve().parents[1]
    if taken != root.resolve():
        raise ImportError(f"The library must be that of {root}, and is that of {taken}.")


def lines_of_parent() -> "queue.Queue[str]":
    """The lines from the parent. When the parent ends, this process ends at once."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


def answer(value: Any) -> None:
    """Tells the parent."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Compiles, and takes turns for as long as there is a parent."""
    root, tree, name, *without = sys.argv[1:]
    lines = lines_of_parent()
    take_library_of(Path(root))

    import jax

    from benchmarks.harness.machine import machine
    from benchmarks.harness.optimizers import BASELINE, made_for
    from benchmarks.harness.steps import start_update
    from benchmarks.harness.trees import TREES
    from benchmarks.versions.tricks import TRICKS

    for trick in without:
        TRICKS[trick]()

    # Where there are several devices, one of them takes the step: arrays that are committed to it
    # keep the others out.
    device = jax.devices()[0]
    network = TREES[tree]
    gradients = jax.device_put(network.arrays(), device)
    baseline, optimizer = (
        start_update(made_for(each, network), jax.device_put(network.arrays(), device), gradients)
        for each in (BASELINE, name)
    )
    answer(
        {
            "trace_s": optimizer.trace_s,
            "compile_s": optimizer.compile_s,
            "temporaries_bytes": optimizer.temporaries_bytes,
            "parameters_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(optimizer.params)),
            "machine": machine(),
        }
    )
    while True:
        lines.get()
        # Another process has had the caches and cores: a step that does not count gets them back.
        baseline.run()
        steps = [(baseline.run(), optimizer.run()) for _ in range(STEPS)]
        answer([statistics.median(seconds) for seconds in zip(*steps, strict=True)])


if __name__ == "__main__":
    main()
