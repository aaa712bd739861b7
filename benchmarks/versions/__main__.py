"""The effect of a change of the library on the cost of a step: versions beside each other.

    python -m benchmarks.versions --versions HEAD~5 .        # a revision and the working tree
    python -m benchmarks.versions --versions main . --devices 1 8 --optimizer lamb lans lars
    python -m benchmarks.versions --versions . . --rounds 50 # the same twice: what is noise
    python -m benchmarks.versions --versions . --without tiles pairs  # what a trick saves
    python -m benchmarks.versions --versions . --devices 1 8 --threads 8  # as many threads each

A configuration is a version and a number of CPU devices, of which one takes the step. Each has a
process of its own with an optimizer and `optax.adamw`; they take turns, one process at a time, in a
new order each time, and in each turn both optimizers take three steps alternately, whose medians
count. `x adamw` is the ratio within a process. `change` is that of this ratio against the first
configuration, `of version` against the first version with as many devices, both turn by turn.
Revisions are checked out into a temporary `git worktree`; only the library is taken from them, and
the benchmark is the same for all.

All configurations of an optimizer are in memory at once: for BERT-base, 3 GB each. Writes
`versions.csv`.
"""

import argparse
import contextlib
import itertools
import signal
import sys
from typing import Any

from tqdm import tqdm

from benchmarks.harness.optimizers import BASELINE, OPTIMIZERS
from benchmarks.harness.results import add_output, report
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio
from benchmarks.versions.configurations import Configuration, Process
from benchmarks.versions.source_trees import commit, source_tree
from benchmarks.versions.tricks import TRICKS


def change(prefix: str, ratios: Any, before: Any) -> dict[str, float]:
    """By how many percent the ratios differ from those before, turn by turn."""
    names = (prefix, f"{prefix}_low", f"{prefix}_high")
    values = ratio(ratios, before)
    return {name: round(100 * (x - 1), 1) for name, x in zip(names, values, strict=True)}


def measure(
    configurations: list[Configuration], tree: str, optimizer: str, rounds: int
) -> list[dict[str, Any]]:
    """One row for each configuration."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(Process(configuration, tree, optimizer))
            for configuration in tqdm(configurations, desc=f"{tree}, {optimizer}: compiling")
        ]
        seconds = in_turns(
            dict(enumerate(processes)),
            rounds,
            shuffled=True,
            description=f"{tree}, {optimizer}: stepping",
        )
    of_adamw = [turns[:, 1] / turns[:, 0] for turns in seconds.values()]
    with_as_many: dict[int, Any] = {}
    rows = []
    for configuration, process, ratios in zip(configurations, processes, of_adamw, strict=True):
        devices, compiled = configuration.devices, process.compiled
        temporaries = compiled["temporaries_bytes"] / compiled["parameters_bytes"]
        rows.append(
            {"tree": tree, "optimizer": optimizer, "version": configuration.name}
            | {"commit": commit(configuration.root)}
            | {"devices": devices, "rounds": rounds}
            | ratio(ratios, 1.0).as_row(3)
            | change("change", ratios, of_adamw[0])
            | change("change_of_version", ratios, with_as_many.setdefault(devices, ratios))
            | {name: round(compiled[name], 2) for name in ("trace_s", "compile_s")}
            | {"temporaries_percent": round(100 * temporaries, 2), "machine": compiled["machine"]}
        )
    return rows


def main() -> None:
    """Measures and reports."""
    # Also when it is ended from elsewhere, the processes and checked out trees go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--versions", nargs="+", default=["HEAD", "."], help="revisions; . is the working tree"
    )
    parser.add_argument("--devices", nargs="+", type=int, default=[1], help="CPU devices")
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base"])
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[None], help="threads of XLA in a process"
    )
    parser.add_argument(
        "--without", nargs="+", choices=TRICKS, default=[], help="tricks to take out, one by one"
    )
    names = [name for name in OPTIMIZERS if name != BASELINE]
    parser.add_argument("--optimizer", nargs="+", choices=names, default=["lamb", "lans", "lars"])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each configuration")
    add_output(parser, "versions")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        roots = {
            version: stack.enter_context(source_tree(version))
            for version in dict.fromkeys(args.versions)
        }
        configurations = [
            Configuration(version, roots[version], devices, threads, without)
            for devices, threads, version, without in itertools.product(
                args.devices, args.threads, args.versions, [None, *args.without]
            )
        ]
        rows = []
        for tree, optimizer in itertools.product(args.tree, args.optimizer):
            rows += measure(configurations, tree, optimizer, args.rounds)
    report(rows, args.output / "versions.csv")


if __name__ == "__main__":
    main()
