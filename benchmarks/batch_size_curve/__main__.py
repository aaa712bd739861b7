"""Steps to a target against batch size, for every optimizer, each tuned with the same budget.

    python -m benchmarks.batch_size_curve                      # hours on two CPU cores
    python -m benchmarks.batch_size_curve --workload digits    # some ten minutes
    python -m benchmarks.batch_size_curve --quick              # a minute: shows that it works
    python -m benchmarks.batch_size_curve --report             # only tables and plots
    python -m benchmarks.batch_size_curve --workload bert_pieces --optimizer muon --batch-size 512
    python -m benchmarks.batch_size_curve --workload large_bert --keep          # on a GPU

Writes `trials.csv`, one line for each trial, `runs.json` with the machine, the versions, the
command and the plan, and, from the table alone, `report.md` and a plot of each workload. The same
command after an interruption continues; a finished trial is not run again. `--optimizer` and
`--batch-size` run a piece now and leave the rest for another time.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.batch_size_curve.optimizers import OPTIMIZERS
from benchmarks.batch_size_curve.pieces import write_pieces
from benchmarks.batch_size_curve.provenance import record
from benchmarks.batch_size_curve.report import write_report
from benchmarks.batch_size_curve.sweep import sweep
from benchmarks.batch_size_curve.workloads import ON_A_CPU, QUICK, WORKLOADS
from benchmarks.harness.machine import folder
from benchmarks.harness.results import COMMITTED, RUNS


def piece(
    optimizers: list[str] | None, batch_sizes: list[int] | None
) -> Callable[[str, int], bool]:
    """Whether a cell is in the piece that is asked for; None for all of them."""
    return lambda optimizer, batch_size: (
        (optimizers is None or optimizer in optimizers)
        and (batch_sizes is None or batch_size in batch_sizes)
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs what is left, and writes the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_size_curve", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, help="default: all of one CPU")
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, help="only these, for now")
    parser.add_argument("--batch-size", nargs="+", type=int, help="only these, for now")
    parser.add_argument("--quick", action="store_true", help="few trials of few optimizers")
    parser.add_argument("--report", action="store_true", help="run nothing, write the report")
    parser.add_argument(
        "--keep", action="store_true", help="into the folder of this chip in benchmarks/results"
    )
    parser.add_argument("--output", type=Path, help="default: a folder in runs")
    args = parser.parse_args(arguments)
    name = "batch_size_curve_quick" if args.quick else "batch_size_curve"
    kept = COMMITTED / folder() / name if args.keep else RUNS / name
    output = args.output or kept
    workloads = QUICK if args.quick else WORKLOADS
    usual = QUICK if args.quick else ON_A_CPU
    chosen = [workloads[name] for name in args.workload or usual]
    if not args.report:
        output.mkdir(parents=True, exist_ok=True)
        record(output / "runs.json", chosen)
        for workload in chosen:
            sweep(workload, output / "trials.csv", piece(args.optimizer, args.batch_size))
    write_report(output, list(workloads.values()))
    write_pieces(output, list(workloads.values()))
    print(f"{output / 'report.md'}")


if __name__ == "__main__":
    main()
