"""The critical batch sizes of MLPerf's BERT and ResNet-50, from the published reference runs.

    python -m benchmarks.critical_batch_of_published_runs --output benchmarks/results

Fits `S = S_min (1 + B_crit / B)` to the steps that the runs of each batch size took to the target.
Every batch size had its own settings, tuned by different people. So the table has the interval over
the runs, and also the range of the fits that leave one batch size out. Prints the table and writes
`critical_batch_of_published_runs.csv`. Takes seconds, and gives the same everywhere.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.results import write_csv
import optax_largebatch as lb

TASKS = {
    "bert-large/lamb/mlperf": "BERT-Large, LAMB, masked-LM accuracy 0.72",
    "resnet50/lars/mlperf": "ResNet-50, LARS, top-1 accuracy 75.9%",
}


class Published(NamedTuple):
    """The runs of one recipe and the fit to them."""

    task: str
    batch_sizes: np.ndarray
    runs: list[np.ndarray]
    """Steps to the target, of each run of each batch size."""
    fit: lb.CriticalBatchSize
    without_one: list[float]
    """The critical batch sizes of the fits that leave one batch size out."""


def fitted() -> list[Published]:
    """The fits of both benchmarks."""
    results = []
    for name, task in TASKS.items():
        examples = lb.recipes.examples_to_target(name)
        batch_sizes = np.array(list(examples))
        runs = [np.array(own) / batch for batch, own in examples.items()]
        rest = [
            ([*batch_sizes[:left_out], *batch_sizes[left_out + 1 :]],
             [*runs[:left_out], *runs[left_out + 1 :]])
            for left_out in range(len(runs))
        ]  # fmt: skip
        fit = lb.fit_critical_batch_size(batch_sizes, runs)
        without_one = [lb.fit_critical_batch_size(*kept).critical_batch_size for kept in rest]
        results.append(Published(task, batch_sizes, runs, fit, without_one))
    return results


def geometric_mean(steps: np.ndarray) -> float:
    """The mean of runs that the fit is made to."""
    return float(np.exp(np.log(steps).mean()))


def fits_table() -> str:
    """Both fits, in Markdown."""
    lines = [
        "| Benchmark | batch sizes | runs | critical batch size | 90% over the runs "
        "| leaving one out | least steps | largest residual |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, batch_sizes, runs, fit, without_one in fitted():
        low, high = fit.interval or (float("nan"), float("nan"))
        largest = np.abs(np.expm1(fit.residuals)).max()
        lines.append(
            f"| {task} | {len(batch_sizes)}, {batch_sizes.min()} to {batch_sizes.max()} "
            f"| {sum(map(len, runs))} | {fit.critical_batch_size:.0f} | {low:.0f} to {high:.0f} "
            f"| {min(without_one):.0f} to {max(without_one):.0f} | {fit.minimum_steps:.0f} "
            f"| {largest:.1%} |"
        )
    return "\n".join(lines)


def steps_table() -> list[dict[str, Any]]:
    """One line for each benchmark and batch size."""
    return [
        {
            "benchmark": task,
            "batch_size": batch,
            "runs": len(own),
            "mean_steps": f"{geometric_mean(own):.1f}",
            "fitted_steps": f"{fit.steps(batch):.1f}",
        }
        for task, batch_sizes, runs, fit, _ in fitted()
        for batch, own in zip(batch_sizes, runs, strict=True)
    ]


def main() -> None:
    """Prints the table; with --output, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a folder for the table")
    options = parser.parse_args()
    print(fits_table())
    if options.output is not None:
        name = "critical_batch_of_published_runs"
        write_csv(steps_table(), options.output / f"{name}.csv")


if __name__ == "__main__":
    main()
