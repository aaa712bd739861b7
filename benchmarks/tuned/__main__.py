"""The test loss after a fixed number of steps, for every optimizer, each tuned alike.

    python -m benchmarks.tuned                        # a night on two CPU cores
    python -m benchmarks.tuned --keep                 # the same, into benchmarks/results
    python -m benchmarks.tuned --quick                # a minute: shows that it works
    python -m benchmarks.tuned --report               # only tables and pictures
    python -m benchmarks.tuned --keep --workload bert --optimizer muonh --batch-size 512
    python -m benchmarks.tuned --keep --workload large_bert large_causal          # on a GPU

Writes a table for each workload, one line for each run, beside it a JSON file with the machine, the
versions, the commands and the plan, and, from the tables alone, `report.md` and its pictures. The
same command after an interruption continues; a finished run is not run again. A cell, one optimizer
with the batches of one plan, comes out the same on the same machine, whenever it is run, so that
`--optimizer` and `--batch-size` may cut the night into pieces. Workloads have tables of their own
and may run side by side, one on each core.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.batch_size_curve.provenance import record
from benchmarks.harness.machine import folder
from benchmarks.harness.results import COMMITTED, RUNS
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.report import write_report
from benchmarks.tuned.sweep import sweep
from benchmarks.tuned.workloads import ON_A_CPU, QUICK, WORKLOADS


def piece(optimizers: list[str] | None, batches: list[str] | None) -> Callable[[str, str], bool]:
    """Whether a cell is in the piece that is asked for; None for all of them."""
    return lambda optimizer, own: (
        (optimizers is None or optimizer in optimizers) and (batches is None or own in batches)
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs what is left, and writes the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuned", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, help="default: all of one CPU")
    parser.add_argument("--optimizer", nargs="+", choices=ARMS, help="only these, for now")
    parser.add_argument(
        "--batch-size",
        nargs="+",
        choices=sorted({name for own in WORKLOADS.values() for name in own.plans}),
        help="only these, or these ramps, for now",
    )
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--report", action="store_true", help="run nothing, write the report")
    parser.add_argument(
        "--keep", action="store_true", help="into the folder of this chip in benchmarks/results"
    )
    parser.add_argument("--output", type=Path, help="default: a folder in runs")
    args = parser.parse_args(arguments)
    name = "tuned_quick" if args.quick else "tuned"
    output = args.output or (COMMITTED / folder() if args.keep else RUNS) / name
    workloads = QUICK if args.quick else WORKLOADS
    usual = QUICK if args.quick else ON_A_CPU
    output.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for workload in [workloads[name] for name in args.workload or usual]:
            record(output / f"{workload.name}.json", [workload], "benchmarks.tuned")
            sweep(workload, output, piece(args.optimizer, args.batch_size))
    write_report(output, workloads.values())
    print(f"{output / 'report.md'}")


if __name__ == "__main__":
    main()
