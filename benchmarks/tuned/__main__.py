"""The test loss after a fixed number of steps, for every optimizer, each tuned alike.

    python -m benchmarks.tuned                        # a night on two CPU cores
    python -m benchmarks.tuned --keep                 # the same, into benchmarks/results
    python -m benchmarks.tuned --quick                # a minute: shows that it works
    python -m benchmarks.tuned --report               # only tables and pictures
    python -m benchmarks.tuned --keep --workload bert --optimizer muonh --batch-size 512
    python -m benchmarks.tuned --keep --workload large_bert large_causal          # on a GPU

Writes a table for each workload, one line for each run, beside it a JSON file with the machine, the
versions, the commands and the plan, and, from the tables alone, `report.md` and its pictures. The
same command after an interruption continues; a finished run is not run again. A cell, an optimizer
with the batches of one plan, comes out the same on the same machine, whenever it is run: pieces
that `--workload`, `--optimizer` and `--batch-size` cut out may run side by side, as long as no two
have a cell in common. Do not pin them to a core: with another number of threads sums are rounded in
another way, which moved the loss at the end by 0.02.

Every optimizer has 24 runs in each cell: 16 trials over rate, decay and momentum with one seed, the
best 3 with one more, the best of these with 5 new seeds. At batch 512 there are 18 more, 8 without
a decay, around the chosen settings. Seconds are of one core of two, in a run of `muonh`, which
costs most, on a machine with other work (those of `causal` at 128 and 2048 follow from 512); the
runs are those of all optimizers.

    workload     batches     steps  examples   seconds a run  runs  hours
    bert         32           1024       33k               8   168    0.4
                 128           384       49k              11   168    0.5
                 512           128       66k              13   274    1.0
                 2048           48       98k              20   168    0.9
    causal       32           1640       52k              22   168    1.0
                 128           448       57k              24   168    1.1
                 512           128       66k              26   274    2.0
                 2048           48       98k              38   168    1.8
    bert_ramp    4 ramps   128-512       66k              13   192    0.7
    causal_ramp  4 ramps   128-512       66k              26    96    0.7
    all of them                                               1844   10.1

So a night on two cores is these two, side by side, and what is left of `causal` after them:

    python -m benchmarks.tuned --keep --workload causal --batch-size 512 2048 128
    python -m benchmarks.tuned --keep --workload bert bert_ramp causal_ramp

The large networks have never been run, and their rates may lie elsewhere.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.machine import folder
from benchmarks.harness.results import COMMITTED, RUNS
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.report import write_report
from benchmarks.tuned.sweep import sweep
from benchmarks.tuned.workloads import ON_A_CPU, QUICK, WORKLOADS


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
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, help="default: all of one CPU")
    parser.add_argument("--optimizer", nargs="+", choices=ARMS, help="only these, for now")
    parser.add_argument(
        "--batch-size",
        nargs="+",
        choices=sorted({name for workload in WORKLOADS.values() for name in workload.plans}),
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
            sweep(workload, output, piece(args.optimizer, args.batch_size))
    write_report(output, workloads.values())
    print(f"{output / 'report.md'}")


if __name__ == "__main__":
    main()
