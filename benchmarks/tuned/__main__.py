"""The test loss after a fixed number of steps, for every optimizer, each tuned alike.

    PYTHON=python3 benchmarks/evidence_on_a_gpu.sh    # bert and causal
    python -m benchmarks.tuned --quick                # a minute: shows that it works
    python -m benchmarks.tuned --report               # only tables and pictures
    python -m benchmarks.tuned --file own.py          # optimizers and tasks of your own
    python -m benchmarks.tuned --keep --workload bert --optimizer muonh --batch-size 512   # a cell

Writes a table for each workload, one line for each run, beside it a JSON file with the machine, the
versions, the commands and the plan, and, from the tables alone, `report.md` and its pictures. The
same command after an interruption continues; a finished run is not run again. Pieces that
`--workload`, `--optimizer` and `--batch-size` cut out may run side by side, as long as no two have
a cell in common: an optimizer with the batches of one plan.

Every optimizer has 80 runs in each cell: 64 trials over rate, decay and momentum with one seed, the
best 4 with two more, the best of these with 8 new seeds. At batch 512 there are 18 more, 10 of them
with another decay, around the chosen settings. Ramps have 16 trials, the best 3 with one more seed,
and 5 new seeds. A core of a CPU takes one run after the other, 8 to 38 seconds each, and so half an
hour for a cell.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.machine import folder
from benchmarks.harness.results import COMMITTED, RUNS
from benchmarks.tuned.report import write_report
from benchmarks.tuned.sweep import sweep
from benchmarks.tuned.workloads import QUICK, WORKLOADS, workloads_in


def piece(optimizers: list[str] | None, batches: list[str] | None) -> Callable[[str, str], bool]:
    """Whether a cell is in the piece that is asked for; None for all of them."""
    return lambda optimizer, plan: (
        (optimizers is None or optimizer in optimizers) and (batches is None or plan in batches)
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs what is left, and writes the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuned", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--file", type=Path, help="a Python file with workloads of your own")
    parser.add_argument("--workload", nargs="+", help="default: all")
    parser.add_argument("--optimizer", nargs="+", help="only these, for now")
    parser.add_argument("--batch-size", nargs="+", help="only these, or these ramps, for now")
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--report", action="store_true", help="run nothing, write the report")
    parser.add_argument(
        "--keep", action="store_true", help="into the folder of this chip in benchmarks/results"
    )
    parser.add_argument("--output", type=Path, help="default: a folder in runs")
    args = parser.parse_args(arguments)
    workloads = workloads_in(args.file) if args.file else QUICK if args.quick else WORKLOADS
    for given, known in (
        (args.workload, workloads),
        (args.optimizer, {name for own in workloads.values() for name in own.optimizers}),
        (args.batch_size, {name for own in workloads.values() for name in own.plans}),
    ):
        if unknown := set(given or ()) - set(known):
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(sorted(known))}")
    name = args.file.stem if args.file else "tuned_quick" if args.quick else "tuned"
    output = args.output or (COMMITTED / folder() if args.keep else RUNS) / name
    if not args.report:
        for workload in [workloads[name] for name in args.workload or workloads]:
            sweep(workload, output, piece(args.optimizer, args.batch_size))
    write_report(output, workloads.values())
    print(f"{output / 'report.md'}")


if __name__ == "__main__":
    main()
