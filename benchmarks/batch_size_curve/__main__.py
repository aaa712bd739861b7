"""Steps to a target against batch size, for every optimizer, each tuned with the same budget.

    python -m benchmarks.batch_size_curve                      # hours on two CPU cores
    python -m benchmarks.batch_size_curve --workload digits    # some ten minutes
    python -m benchmarks.batch_size_curve --quick              # a minute: shows that it works
    python -m benchmarks.batch_size_curve --report             # only tables and plots

Writes `trials.csv`, one line for each trial, `runs.json` with the machine, the versions, the
command and the plan, and, from the table alone, `report.md` and a plot of each workload. The same
command after an interruption continues; a finished trial is not run again.
"""

import argparse
from pathlib import Path

from benchmarks.batch_size_curve.provenance import record
from benchmarks.batch_size_curve.report import write_report
from benchmarks.batch_size_curve.sweep import sweep
from benchmarks.batch_size_curve.workloads import QUICK, WORKLOADS
from benchmarks.harness.results import RUNS


def main(arguments: list[str] | None = None) -> None:
    """Runs what is left, and writes the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_size_curve", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--quick", action="store_true", help="few trials of few optimizers")
    parser.add_argument("--report", action="store_true", help="run nothing, write the report")
    parser.add_argument("--output", type=Path, help="default: a folder in runs")
    args = parser.parse_args(arguments)
    name = "batch_size_curve_quick" if args.quick else "batch_size_curve"
    output = args.output or RUNS / name
    workloads = QUICK if args.quick else WORKLOADS
    chosen = [workloads[name] for name in args.workload]
    if not args.report:
        output.mkdir(parents=True, exist_ok=True)
        record(output / "runs.json", chosen)
        for workload in chosen:
            sweep(workload, output / "trials.csv")
    write_report(output, list(workloads.values()))
    print(f"{output / 'report.md'}")


if __name__ == "__main__":
    main()
