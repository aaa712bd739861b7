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

All configurations of an optimizer are in memory at once: for BERT-base, 3 GB each. With `--output`,
writes `versions.csv` there.
"""

import argparse
import contextlib
import itertools
from pathlib import Path
import signal
import sys
from typing import Any

from tqdm import tqdm

from benchmarks.harness.optimizers import BASELINE, OPTIMIZERS
from benchmarks.harness.results import write_csv
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio
from benchmarks.versions.configurations import Configuration, Process
from benchmarks.versions.source_trees import commit, source_tree
from benchmarks.versions.tricks import TRICKS


def change(prefix: str, own: Any, before: Any) -> dict[str, float]:
    """By how many percent the ratios differ from those before, turn by turn."""
    columns = zip((prefix, f"{prefix}_low", f"{prefix}_high"), ratio(own, before), strict=True)
    return {name: round(100 * (value - 1), 1) for name, value in columns}


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
    ratios = [own[:, 1] / own[:, 0] for own in seconds.values()]
    with_as_many: dict[int, Any] = {}
    rows = []
    for configuration, process, own in zip(configurations, processes, ratios, strict=True):
        devices = configuration.devices
        report = process.report
        temporaries = report["temporaries_bytes"] / report["parameters_bytes"]
        rows.append(
            {"tree": tree, "optimizer": optimizer, "version": configuration.name}
            | {"commit": commit(configuration.root)}
            | {"devices": devices, "rounds": rounds}
            | ratio(own, 1.0).columns(3)
            | change("change", own, ratios[0])
            | change("change_of_version", own, with_as_many.setdefault(devices, own))
            | {name: round(report[name], 2) for name in ("trace_s", "compile_s")}
            | {"temporaries_percent": round(100 * temporaries, 2), "machine": report["machine"]}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    versions = [f"{row['version']} ({row['commit']})" for row in rows]
    wide = max(map(len, versions))
    lines = [
        f"{'tree':<20} {'optimizer':<12} {'version':<{wide}} {'devices':>7} {'x adamw':>8} "
        f"{'10%..90%':>13} {'change, %':>10} {'10%..90%':>14} {'of version, %':>14} "
        f"{'10%..90%':>14} {'trace s':>8} {'compile s':>10} {'temporaries, %':>15}"
    ]
    for version, row in zip(versions, rows, strict=True):
        spreads = [
            f"{row[name]:>+{width}.1f} {row[f'{name}_low']:>+6.1f}..{row[f'{name}_high']:<+6.1f}"
            for name, width in (("change", 10), ("change_of_version", 14))
        ]
        lines.append(
            f"{row['tree']:<20} {row['optimizer']:<12} {version:<{wide}} {row['devices']:>7} "
            f"{row['ratio']:>8.2f} {row['ratio_low']:>6.2f}..{row['ratio_high']:<5.2f} "
            f"{' '.join(spreads)} {row['trace_s']:>8.2f} {row['compile_s']:>10.2f} "
            f"{row['temporaries_percent']:>15.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures, prints and, if it is told where, writes."""
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
    parser.add_argument("--output", type=Path, help="a folder for the table")
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
    if args.output is not None:
        write_csv(rows, args.output / "versions.csv")
    print("\n".join(dict.fromkeys(row["machine"] for row in rows)))
    print(table(rows))


if __name__ == "__main__":
    main()
