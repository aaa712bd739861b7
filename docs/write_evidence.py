"""Writes the tables that pages and the README have from the committed trials.

python -m docs.write_evidence
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from pathlib import Path
import re

import jax

from benchmarks import changed_run, critical_batch_of_tokens, rate_of_the_rest, transfer, zeros
from benchmarks.harness.pages import markdown, with_tables
from benchmarks.harness.results import COMMITTED, read
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.results import Measured, Results, measured
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.tables import losses_table
from benchmarks.tuned.workloads import BERT, CAUSAL, CAUSAL_LONG, DIGITS, WORKLOADS, Workload
from docs import draw_evidence
from docs.draw_evidence import token_rows
from optax_largebatch.plans.law import LAWS

ROOT = Path(__file__).parents[1]
OPTIMIZERS = ("adamw", "lamb", "lans", "muon", "muonh")


def tuned(name: str) -> tuple[Workload, Results]:
    """A workload, and the results of its complete cells."""
    workload = WORKLOADS[name]
    return workload, measured(workload, committed(workload))


def tuned_table(name: str) -> str:
    """The test losses of the optimizers at four batch sizes."""
    workload, results = tuned(name)
    return losses_table(workload, {own: results[own] for own in OPTIMIZERS})


def lost_by_momentum(cell: Measured) -> float:
    """What the best trial with a momentum above 0.9 loses more than the best of all trials."""
    high = min(loss for own, loss in cell.searched.items() if own.momentum > 0.9)
    return high - min(cell.searched.values())


def momentum_table(name: str) -> str:
    """What such trials lose, by optimizer and batch size."""
    workload, results = tuned(name)
    lines = []
    for optimizer in OPTIMIZERS:
        cells = [results[optimizer][batches] for batches in workload.plans]
        lines.append([f"`{optimizer}`", *(f"{lost_by_momentum(cell):.3f}" for cell in cells)])
    return markdown(["optimizer", *workload.plans], lines)


def lead(results: Results, name: str, batches: str) -> dict[int, float]:
    """What MuonH is ahead of an optimizer, by seed."""
    ahead, behind = results["muonh"][batches].losses, results[name][batches].losses
    return {seed: behind[seed] - ahead[seed] for seed in ahead}


def growth(name: str, optimizer: str) -> Difference:
    """How much larger that lead is at the largest batch than at the smallest, seed by seed."""
    workload, results = tuned(name)
    smallest, *_, largest = workload.plans
    return difference(lead(results, optimizer, largest), lead(results, optimizer, smallest))


RUNS = {"A": BERT, "B": CAUSAL, "C": CAUSAL_LONG, "D": DIGITS}
"""The letters by which Evidence says where a sentence was seen."""


def peaks(workload: Workload) -> tuple[list[float], list[float]]:
    """The best peaks of MuonH in a search, and those that the law made of one."""
    rows = transfer.committed_rows()
    searched = transfer.searches(workload)["muonh"].values()
    moved = {
        row.learning_rate
        for row in rows
        if (row.workload, row.optimizer, row.way) == (workload.name, "muonh", "law")
    }
    return sorted(own.settings.learning_rate for own in searched), sorted(moved)


def peaks_of_lengths() -> tuple[list[float], list[float]]:
    """The same of the runs of four lengths, E."""
    ours = [row for row in token_rows() if row.optimizer == "muonh"]
    return tuple(
        sorted({row.learning_rate for row in ours if row.way.startswith(way)})
        for way in ("best", "law")
    )


def seen_table() -> str:
    """What each letter stands for."""
    lines = []
    for letter, workload in RUNS.items():
        params = jax.eval_shape(workload.task().init, jax.random.key(0))
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        results = transfer.searches(workload)
        steps = [workload.plans[batches].total_steps for batches in results["muonh"]]
        angles = (f"{own[0]:.2g} to {own[-1]:.2g}" for own in peaks(workload))
        lines.append(
            [
                letter,
                workload.title,
                f"{size / 1000:.0f} thousand",
                ", ".join(sorted(results["muonh"], key=int)),
                f"{min(steps)} to {max(steps)}",
                *angles,
            ]
        )
    steps = [plan.total_steps for plan in critical_batch_of_tokens.WORKLOAD.plans.values()]
    lines.append(
        [
            "E",
            "that of C, runs of four lengths",
            lines[-2][2],
            ", ".join(map(str, critical_batch_of_tokens.BATCHES)),
            f"{min(steps)} to {max(steps)}",
            *(f"{own[0]:.2g} to {own[-1]:.2g}" for own in peaks_of_lengths()),
        ]
    )
    heads = ["", "network", "parameters", "batches", "steps", "MuonH's best angles", "moved to"]
    return markdown(heads, lines)


def lost(workload: Workload, way: str) -> list[Difference]:
    """What MuonH's settings lose to a search, moved to a batch 8 times as large or more."""
    moves = dict(draw_evidence.moves(workload))
    return [ways[way] for name, ways in moves.items() if name.startswith("muonh") and way in ways]


def short(own: Difference) -> str:
    """A difference and how far its interval reaches, in bold if that leaves out 0."""
    text = f"{own.mean:+.3f}±{own.high - own.mean:.3f}"
    return f"**{text}**" if own.is_clear else text


def turned(low: float, high: float) -> str:
    """What MuonH's best trial loses whose rate**2 x steps is between two numbers: A, B and C."""
    lost = []
    for workload in (BERT, CAUSAL, CAUSAL_LONG):
        for batches, cell in transfer.searches(workload)["muonh"].items():
            steps = workload.plans[batches].total_steps
            near = [
                loss
                for own, loss in cell.searched.items()
                if low <= own.learning_rate**2 * steps < high
            ]
            lost += [min(near) - min(cell.searched.values())] if near else []
    return f"{low:g} to {high:g}: {min(lost):+.3f} to {max(lost):+.3f}"


def by_limit(beyond: bool) -> str:
    """What moves of others than MuonH lose on D, within or beyond the limits of the warnings."""
    rows, results = transfer.committed_rows(), transfer.searches(DIGITS)
    losses = transfer.losses_of(rows, DIGITS)
    rates: dict[tuple[str, ...], float] = {row.place: row.learning_rate for row in rows}
    lost = []
    for place, own in losses.items():
        search = transfer.searched(losses, place[:4], results)
        is_beyond = rates[place] > LAWS[place[1]].highest_rate
        is_a_move = place[1] != "muonh" and place[4] in ("law", "highest rate")
        if is_a_move and is_beyond == beyond and own.keys() == search.keys():
            lost.append(difference(own, search).mean)
    return f"{min(lost):+.3f} to {max(lost):+.3f}, {len(lost)} moves (D)"


def started(workload: Workload, batches: str) -> str:
    """What MuonH loses to a search from each start at sqrt(rate x decay)."""
    losses = transfer.losses_of(transfer.committed_rows(), workload)
    place = (workload.name, "muonh", batches, batches)
    search = transfer.searched(losses, place, transfer.searches(workload))
    ways = (losses[*place, f"settled {x:g}"] for x in transfer.SETTLED)
    return ", ".join(short(difference(own, search)) for own in ways)


def ahead(batches: str) -> str:
    """The least lead of MuonH over AdamW, LAMB and LANS on D."""
    results = transfer.searches(DIGITS)
    ours = results["muonh"][batches].losses
    others = (difference(results[name][batches].losses, ours) for name in OPTIMIZERS[:3])
    return short(min(others))


def ahead_in_long(batches: str) -> str:
    """The lead of MuonH over AdamW in the longest runs of E."""
    losses = (
        critical_batch_of_tokens.losses_of(token_rows(), name)[int(batches)]
        for name in ("adamw", "muonh")
    )
    return short(difference(*(own[critical_batch_of_tokens.BUDGETS[-1]] for own in losses)))


def claims_table() -> str:
    """What the law and the warnings claim, where it was read off, and what came after."""

    def before(way: str, workloads: Sequence[Workload] = (BERT, CAUSAL)) -> str:
        means = [own.mean for workload in workloads for own in lost(workload, way)]
        return f"{min(means):+.3f} to {max(means):+.3f}, {len(means)} moves"

    def after(way: str) -> str:
        return "; ".join(
            f"{letter}: {', '.join(map(short, lost(RUNS[letter], way)))}" for letter in "CD"
        )

    def lowered(letter: str, kept: str) -> str:
        """What the law loses more than a way that keeps the momentum."""
        losses = transfer.losses_of(transfer.committed_rows(), RUNS[letter])
        places = [(RUNS[letter].name, "muonh", "16", large) for large in ("128", "512")]
        both = (difference(losses[*x, "law"], losses[*x, kept]) for x in places)
        return f"{letter}: {', '.join(map(short, both))}"

    high = [
        f"{lost_by_momentum(results['muonh'][batches]):+.3f}"
        for results in map(transfer.searches, (BERT, CAUSAL_LONG, DIGITS))
        for batches in sorted(results["muonh"], key=int)[-2:]
    ]

    def of_lengths(runs: int, batch: str = "") -> str:
        """What the law loses on E, in the shortest runs and to this batch."""
        moves = critical_batch_of_tokens.law_over_search(token_rows())
        means = [x.mean for move, own in moves.items() if batch in move for x in own[:runs]]
        return f"{min(means):+.3f} to {max(means):+.3f}, {len(means)} moves (E)"

    return markdown(
        ["claim for MuonH", "in sample", "out of sample: from 16 to 128, to 512"],
        [
            [
                "by the law: near a search",
                f"{before('law')} (A, B)",
                f"{after('law')}; {of_lengths(len(critical_batch_of_tokens.BUDGETS))}",
            ],
            ["by the root alone: worse", f"{before('sqrt')} (A, B)", after("sqrt")],
            ["settings kept: worse", f"{before('kept', [BERT])} (A)", after("kept")],
            [
                "momentum down to 0.7: as good as kept",
                "as any floor (A)",
                f"{lowered('C', 'sqrt')}; {lowered('D', 'momentum kept')}",
            ],
            ["others by the law, unwarned", "up to +0.08 (A, B)", by_limit(beyond=False)],
            [
                "limits of the warnings",
                "all that lost above 0.1 are beyond (A, B)",
                by_limit(beyond=True),
            ],
            [
                "momentum above 0.9: worse",
                f"at 512, 2048: {', '.join(high[:2])} (A)",
                f"{', '.join(high[2:4])} (C); {', '.join(high[4:])} (D)",
            ],
            [
                "ahead of AdamW, LAMB, LANS",
                "at every batch (A, B)",
                f"at 16, 128, 512: {', '.join(map(ahead, DIGITS.plans))} (D); "
                f"of AdamW in the longest runs {', '.join(map(ahead_in_long, DIGITS.plans))} (E)",
            ],
            [
                "start at sqrt(rate x decay), by rate x decay x steps; warned of below 1",
                "; ".join(turned(*both) for both in itertools.pairwise((0.1, 0.3, 1, 3, 10)))
                + " (A, B, C)",
                f"at {', '.join(f'{x:g}' for x in transfer.SETTLED)}: {started(CAUSAL, '32')} (B); "
                f"{started(DIGITS, '16')} (D)",
            ],
            [
                "the rest at 3/13 of the angle",
                "Marin's runs",
                "a quarter: 0.08 to 0.12 worse; four times: no better (A, B)",
            ],
            ["valid below the critical batch", "not measured", f"beyond: {of_lengths(3, '512')}"],
        ],
    )


def rest_rows() -> list[rate_of_the_rest.Row]:
    """Runs of MuonH with Adam at other shares of its rate."""
    return read(COMMITTED / "cpu-2-cores" / "rate_of_the_rest.csv", rate_of_the_rest.Row)


def zeros_table(kind: str) -> str:
    """What matrices that start at zero lose, by who moves them."""
    rows = read(COMMITTED / "cpu-2-cores" / "zeros.csv", zeros.Row)
    return zeros.table(rows, [case for case in zeros.CASES if re.match(kind, case)])


def changes_table(name: str) -> str:
    """What a run has by a change at its half."""
    rows = read(COMMITTED / "cpu-2-cores" / "changed_run.csv", changed_run.Row)
    return changed_run.table(rows, changed_run.TABLES[name])


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "evidence.md": {
        "seen": seen_table,
        "claims": claims_table,
    },
    ROOT / "docs" / "details" / "how_it_was_measured.md": {
        "momentum": functools.partial(momentum_table, "bert"),
        "rest": lambda: rate_of_the_rest.table(rest_rows()),
        "critical": lambda: critical_batch_of_tokens.critical_table(token_rows()),
        "as_good": lambda: critical_batch_of_tokens.as_good_table(token_rows()),
        "rates": lambda: critical_batch_of_tokens.rates_table(token_rows()),
        "floors": lambda: transfer.floors_table(transfer.committed_rows(), tuned("bert")[1]),
    },
    ROOT / "docs" / "algorithms" / "muonh.md": {
        "zeros": functools.partial(zeros_table, ".* 512"),
    },
    ROOT / "docs" / "guides" / "changing_a_run.md": {
        "losses": functools.partial(changes_table, "losses")
    },
    ROOT / "docs" / "index.md": {"tuned": functools.partial(tuned_table, "bert")},
}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return with_tables(page, "docs/write_evidence.py", tables)


if __name__ == "__main__":
    for path, tables in PAGES.items():
        path.write_text(written(path.read_text(), tables))
