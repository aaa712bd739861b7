"""How long a step takes to trace and to compile: versions of the library beside each other.

    python -m benchmarks.compile_time --versions HEAD~5 .
    python -m benchmarks.compile_time --versions main . --target "one H100" --case bert-base

A turn is a new process, which traces and compiles one step and counts its CPU seconds; the versions
take turns. `ratio` is to the first version, the median over turns. An accelerator is not needed,
only its compiler (`make compilers`). With `--output`, writes `compile_time.csv` there.
"""

import argparse
import contextlib
import itertools
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.harness.results import write_csv
from benchmarks.harness.turns import in_turns, ratio
from benchmarks.versions.source_trees import commit, source_tree

CPU = "one CPU"


class Compilation:
    """The compilation of a step by one version."""

    def __init__(self, root: Path, cell: tuple[str, str, str]):
        # The library, and the steps, are those of the version.
        self._command = [sys.executable, "-P", __file__, "--worker", *cell]
        self._environment = os.environ | {"PYTHONPATH": str(root)}

    def run(self) -> float:
        """Compiles, and returns the CPU seconds that it took."""
        done = subprocess.run(
            self._command, check=True, text=True, capture_output=True, env=self._environment
        )
        return float(done.stdout.split()[-1])


def compile_once(target_name: str, case_name: str, name: str) -> None:
    """Traces and compiles one step, and prints the CPU seconds."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from benchmarks.compiled_step.cases import CASES
    from benchmarks.compiled_step.targets import TARGETS
    from benchmarks.harness.steps import updated

    params, state, gradients, optimizer = CASES[case_name].arguments(name)
    arguments = (params, state, gradients)
    if target_name == CPU:
        alone = SingleDeviceSharding(jax.devices("cpu")[0])
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), arguments
        )
    else:
        arguments = TARGETS[target_name].placed(arguments)

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        return updated(optimizer, gradients, params, state)

    start = time.process_time()
    jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    print(time.process_time() - start)


def main() -> None:
    """Compiles in turns, and prints."""
    if sys.argv[1:2] == ["--worker"]:
        return compile_once(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", nargs="+", required=True, help='revisions, or "."')
    parser.add_argument("--target", nargs="+", default=[CPU, "one H100", "one v5e"])
    parser.add_argument("--case", nargs="+", default=["bert-base", "1000 leaves"])
    parser.add_argument("--optimizer", nargs="+", default=["lamb", "lans"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with contextlib.ExitStack() as stack:
        roots = {name: stack.enter_context(source_tree(name)) for name in args.versions}
        for cell in itertools.product(args.target, args.case, args.optimizer):
            contenders = {name: Compilation(root, cell) for name, root in roots.items()}
            seconds = in_turns(
                contenders, args.turns, left_out=0, shuffled=True, description=", ".join(cell)
            )
            for name, own in seconds.items():
                of_first = ratio(own, seconds[args.versions[0]]).columns(3)
                row = dict(zip(("target", "case", "optimizer"), cell, strict=True))
                row |= {"version": name, "commit": commit(roots[name]), "turns": args.turns}
                rows.append(row | {"cpu_s": round(float(np.median(own)), 2)} | of_first)
                print("  ".join(str(x).ljust(11) for x in rows[-1].values()))
            if args.output:
                write_csv(rows, args.output / "compile_time.csv")


if __name__ == "__main__":
    main()
