"""Tables and pictures, from the tables of runs alone."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness.colours import colours_of
from benchmarks.harness.results import read
from benchmarks.tuned.pictures import plot_curves, plot_losses
from benchmarks.tuned.results import curves, measured
from benchmarks.tuned.sweep import Row, table_of
from benchmarks.tuned.tables import (
    differences_table,
    losses_table,
    ramps_table,
    settings_table,
)
from benchmarks.tuned.workloads import REFERENCES, Workload


def write_report(output: Path, workloads: Iterable[Workload]) -> None:
    """`report.md` and the pictures of each workload that has results."""
    parts = ["# Test loss after a fixed number of steps", EXPLANATION]
    for workload in workloads:
        parts += section(workload, read(table_of(workload, output), Row), output)
    (output / "report.md").write_text("\n\n".join(parts) + "\n")


def section(workload: Workload, rows: list[Row], output: Path) -> list[str]:
    """The part of the report that has one workload."""
    results = measured(workload, rows)
    if not results:
        return []
    budget = workload.budget
    parts = [
        f"## {workload.title[0].upper()}{workload.title[1:]}",
        f"{budget.trials} trials, the best {budget.finalists} with {budget.again} more seeds, the "
        f"best of these with {budget.finals} new ones: {budget.runs} runs for each optimizer.",
    ]
    if workload.is_ramp:
        return [*parts, ramps_table(workload, results), settings_table(results)]
    parts.append(losses_table(workload, results))
    references = [name for name in REFERENCES if name in results] or list(results)[:1]
    if len(results) > 1:
        parts += [differences_table(workload, results, name) for name in references]
    parts.append(settings_table(results))
    plot_losses(workload, results, output / f"{workload.name}.png")
    parts.append(f"![{workload.title}]({workload.name}.png)")
    for batches in workload.around:
        rates, decays = (curves(workload, rows, batches, role) for role in ("rate", "decay"))
        if rates:
            name = f"{workload.name}_around_{batches}.png"
            title = f"{workload.title}, batch {batches}"
            plot_curves(title, rates, decays, colours_of(workload.optimizers), output / name)
            parts.append(f"![{title}, how far one may be wrong]({name})")
    return parts


EXPLANATION = """\
Written by `python -m benchmarks.tuned --report` from the tables of runs; the JSON file beside each
has the machine, the versions and the commands. The learning rate ends at 0. Settings are chosen by
the validation loss; the test loss is shown, in the mean over seeds that the search has not seen;
`*`: the chosen rate is near an end of its range, a better one may lie outside. Differences are
taken seed by seed, in brackets the interval of Student's distribution that holds 95%, in bold those
whose interval leaves out 0: only then is one better than the other."""
