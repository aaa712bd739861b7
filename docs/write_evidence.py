"""Writes what other pages have from the committed trials: `docs/evidence.md`, a guide, the README.

python -m docs.write_evidence
"""

from collections.abc import Callable
import functools
from pathlib import Path
import re

from benchmarks.batch_size_curve.pieces import ADDED, EXCHANGED, TUNED, VARIED, Groups, saved_table
from benchmarks.batch_size_curve.report import measured, steps_column, tables
from benchmarks.batch_size_curve.stack_ratios import NAME, read_spreads, spread_table
from benchmarks.batch_size_curve.sweep import read
from benchmarks.batch_size_curve.workloads import ON_A_CPU, WORKLOADS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "batch_size_curve"
TRIALS = RESULTS / "trials.csv"
APART = ("digits", "bert_pieces")
# Rows and columns of the README.
SHORT = ("adamw", "adamw_momentum_0.8", "nadamw", "lamb", "lans", "muon")
SIZES = {"digits": (16, 128, 1024), "bert_pieces": (32, 128, 512)}
# Rows and columns of the guide: batch sizes that are a factor of 64 apart.
STARTED = ("adamw", "lamb", "lans")
APART_BY_64 = {"digits": (16, 1024), "bert_pieces": (32, 2048)}


def full_tables(name: str) -> str:
    """The tables of the report."""
    return tables(WORKLOADS[name], read(TRIALS))


def saved_steps(name: str, groups: Groups) -> str:
    """What one optimizer saves over another."""
    return saved_table(measured(WORKLOADS[name], read(TRIALS)), groups)


def spreads() -> str:
    """How far apart the layers of a stack are."""
    return spread_table(read_spreads(RESULTS / f"{NAME}.csv"))


def short_table() -> str:
    """Some optimizers at some batch sizes."""
    rows = read(TRIALS)
    columns = {
        f"{name.partition('_')[0]}, batch {size}": steps_column(
            {own: cells for own, cells in measured(WORKLOADS[name], rows).items() if own in SHORT},
            size,
        )
        for name, sizes in SIZES.items()
        for size in sizes
    }
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for optimizer in SHORT:
        texts = [column.get(optimizer, "") for column in columns.values()]
        lines.append(f"| `{optimizer}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def best_rates(name: str, optimizer: str) -> list[float]:
    """The best rates of an optimizer at the smaller and at the larger batch size."""
    cells = measured(WORKLOADS[name], read(TRIALS))[optimizer]
    return [cells[size].settings.learning_rate for size in APART_BY_64[name]]


def rates_table() -> str:
    """The best rates of some optimizers at two batch sizes, and how far they grew."""
    heads = [""]
    for name, (small, large) in APART_BY_64.items():
        short = name.partition("_")[0]
        heads += [f"{short}, batch {small}", f"{short}, batch {large}", "times"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for optimizer in STARTED:
        cells = [f"`{optimizer}`"]
        for name in APART_BY_64:
            small, large = best_rates(name, optimizer)
            cells += [f"{small:.2g}", f"{large:.2g}", f"{large / small:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "evidence.md": {
        **{name: functools.partial(full_tables, name) for name in ON_A_CPU},
        **{
            f"{name}, {what}": functools.partial(saved_steps, name, groups)
            for name in APART
            for what, groups in (("added", ADDED), ("exchanged", EXCHANGED))
        },
        "bert_pieces, tuned": functools.partial(saved_steps, "bert_pieces", TUNED),
        "bert_pieces, varied": functools.partial(saved_steps, "bert_pieces", VARIED),
        "stack_ratios": spreads,
    },
    ROOT / "docs" / "guides" / "from_adamw_to_16k.md": {"small_rates": rates_table},
    ROOT / "README.md": {"evidence": short_table},
}


def written(path: Path, page: str) -> str:
    """The page as it should be."""
    for name, table in PAGES[path].items():
        begin, end = f"<!-- {name}: made by docs/write_evidence.py -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{path.name} must have one {begin!r} and one {end!r}.")
        between = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
        made = f"\n{table()}\n\n"
        page = between.sub(lambda match, made=made: made, page)
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path, path.read_text()))
