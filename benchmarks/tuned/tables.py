"""The tables of the report, in Markdown."""

from benchmarks.harness.pages import markdown
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import Measured, Results
from benchmarks.tuned.workloads import Workload


def losses_table(workload: Workload, results: Results) -> str:
    """The mean test loss by optimizer and batches, the least in bold."""
    columns = _columns(workload, results)
    least = {
        batches: min(own[batches].mean for own in results.values() if batches in own)
        for batches in columns
    }

    def text(own: Measured | None, least: float) -> str:
        if own is None:
            return ""
        loss = f"{own.mean:.3f}"
        return (f"**{loss}**" if own.mean == least else loss) + "\\*" * own.edge

    return markdown(
        ["optimizer", *columns.values()],
        [
            [f"`{name}`", *(text(own.get(batches), least[batches]) for batches in columns)]
            for name, own in results.items()
        ],
    )


def differences_table(workload: Workload, results: Results, reference: str) -> str:
    """What each optimizer loses more than one of them, with the same seeds."""
    columns = _columns(workload, {reference: results[reference]})
    lines = []
    for name, own in results.items():
        if name != reference:
            pairs = {
                batches: difference(own[batches].losses, results[reference][batches].losses)
                for batches in columns
                if batches in own
            }
            lines.append([f"`{name}`", *(str(pairs.get(batches, "")) for batches in columns)])
    return markdown([f"minus `{reference}`", *columns.values()], lines)


def ramps_table(workload: Workload, results: Results) -> str:
    """Steps and loss of each plan, and what it loses more than the first of them."""
    first = next(iter(workload.plans))
    lines = []
    for name, own in results.items():
        for batches, cell in own.items():
            apart = ""
            if first in own and batches != first:
                apart = str(difference(cell.losses, own[first].losses))
            steps = str(workload.plans[batches].total_steps)
            loss = f"{cell.mean:.3f}" + "\\*" * cell.edge
            lines.append([f"`{name}`", batches, steps, loss, apart])
    return markdown(["optimizer", "batches", "steps", "test loss", f"minus {first}"], lines)


def settings_table(results: Results) -> str:
    """The chosen settings, and the loss with every new seed."""
    lines = [
        [
            f"`{name}`",
            batches,
            f"{cell.settings.learning_rate:g}",
            f"{cell.settings.weight_decay:g}",
            f"{cell.settings.momentum:g}",
            ", ".join(f"{loss:.3f}" for loss in cell.losses.values()),
        ]
        for name, own in results.items()
        for batches, cell in own.items()
    ]
    return markdown(["optimizer", "batches", "rate", "decay", "momentum", "with each seed"], lines)


def _columns(workload: Workload, results: Results) -> dict[str, str]:
    """The heads of the columns that have results: the batch size, and the steps of a run."""
    return {
        batches: f"{batches}, {plan.total_steps} steps"
        for batches, plan in workload.plans.items()
        if any(batches in own for own in results.values())
    }
