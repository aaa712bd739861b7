"""Writes the tables of the pages on recipes and what their programs print.

python docs/write_recipes.py
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from fractions import Fraction
import io
from pathlib import Path
import re
from typing import Any

import jax

from benchmarks.critical_batch_of_published_runs import fits_table
from benchmarks.harness.pages import with_tables
import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS
from optax_largebatch.plans.tuned_run import FAMILIES
from optax_largebatch.recipes.catalogue import FIELDS, Entry, lines, published, rows
from optax_largebatch.recipes.lookup import STATED_RULES

DOCS = Path(__file__).parent

REACHED = {
    "supervised vision": "`reached` is top-1 accuracy on ImageNet unless a cell says otherwise.",
    "self-supervised vision": "`reached` is top-1 accuracy on ImageNet by a linear probe.",
}


def recipes_table() -> str:
    """The recipes by field, one line for each."""
    parts = []
    for field in FIELDS:
        if field == "ramps":
            continue
        has_epochs = any(line.length for line in lines(field))
        head = ["Recipe", "batch sizes", "epochs", "rate", "decay", "reached, [to be passed]"]
        if not has_epochs:
            head.remove("epochs")
        parts += [
            f"## {field[0].upper()}{field[1:]}\n",
            *([f"{REACHED[field]}\n"] if field in REACHED else []),
            *_head(head),
        ]
        for line in lines(field):
            entry = published()[line.name]
            decay = _range([row["weight_decay"] for row in rows(entry) if "weight_decay" in row])
            missing = f" [{line.not_said}]" if line.not_said else ""
            reached = line.result.replace(" top-1", "") if field in REACHED else line.result
            cells = [
                *(f"`{line.name}`", line.batch_sizes),
                *([line.length] if has_epochs else []),
                *(_rate(entry), decay, f"{reached}{missing}"),
            ]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def ramps_table() -> str:
    """The ramps of the batch size, one line for each."""
    table = _head(("Ramp", "batch sizes", "the last from", "rate", "[to be passed]"))
    for line in lines("ramps"):
        missing = f"[{line.not_said}]" if line.not_said else ""
        cells = (line.batch_sizes, line.length, published()[line.name]["law"], missing)
        table.append(f"| `{line.name}` | {' | '.join(cells)} |")
    return "\n".join(table)


def _head(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _rate(entry: Entry) -> str:
    """The published rates, or the rule that they are published as."""
    own = rows(entry)
    bases = [row["base_learning_rate"] for row in own if "base_learning_rate" in row]
    if bases:
        return f"{_range(bases)} {STATED_RULES[entry['rule']][0]}"
    return _range([row["learning_rate"] for row in own if "learning_rate" in row])


def rules_table() -> str:
    """What the rules make of the smallest published batch, beside what was published."""
    lines = [
        "| Recipe | from, at | to | published rate | root | linear |",
        "|---|---|---|---|---|---|",
    ]
    pairs = {
        "bert-large/lamb/mlperf": (256, (1536, 8192, 16384)),
        "resnet50/lars/mlperf": (1632, (8192, 32768, 65536)),
    }
    for name, (small, larges) in pairs.items():
        rate = lb.recipes.get(name, small).learning_rate
        run = lb.TunedRun("lamb", batch_size=small, total="1B", learning_rate=rate)
        for large in larges:
            published = lb.recipes.get(name, large).learning_rate
            guesses = [
                lb.batch_plan(large, total="1B", run=run, law=law).rates[2]
                for law in ("sqrt", "sgd")
            ]
            cells = " | ".join(f"{guess:.3g}, x {guess / published:.2f}" for guess in guesses)
            lines.append(f"| `{name}` | {small}, {rate:g} | {large} | {published:.3g} | {cells} |")
    return "\n".join(lines)


def at_32_table() -> str:
    """What each law makes of one run at 32 times the batch, with the same number of examples."""
    start = {"weight_decay": 0.1, "momentum": 0.95, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
    head = ["law", "learning rate", *(f"{name} {value:g}" for name, value in start.items())]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for law in LAWS:
        optimizer: Any = law if law in FAMILIES else "adamw"
        numbers = {name: start[name] for name in FAMILIES[optimizer][1]}
        run = lb.TunedRun(
            optimizer, batch_size=256, total="10M", learning_rate=1.0, weight_decay=0.1, **numbers
        )
        moved = lb.batch_plan(8192, total="10M", run=run, law=law).moved(8192)
        cells = [
            f"{moved[name].value * (0.1 if name == 'weight_decay' else 1):.4g}"
            if name in moved
            else ""
            for name in start
        ]
        rate = f"x {moved['learning_rate'].value:.4g}"
        lines.append(f"| {' | '.join([f'`{law}`', rate, *cells])} |")
    return "\n".join(lines).replace("e-", "e\u2011")  # a hyphen that breaks no line


KINDS = {
    "embed": ("the embedding", (64, 16)),
    "layers/kernel": ("matrices of the layers", (2, 16, 16)),
    "layers/experts/kernel": ("matrices of experts", (2, 4, 16, 16)),
    "layers/bias": ("biases, scales of norms", (2, 16)),
    "head": ("the last layer", (16, 64)),
}
STEPS = {"": "", "sphere": ", keeps its norm", "trust ratio": ", trust ratio"}


def movers_table() -> str:
    """Who moves which parameters of a transformer, as `explain` finds it."""
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (_, shape) in KINDS.items()}
    stacked = {"layers/experts/": (0, 1), "layers/(?!experts)": 0}
    run = lb.TunedRun("adamw", batch_size=512, total="1M", learning_rate=1e-3, weight_decay=0.1)
    runs = {
        "muonh": run.to("muonh"),
        "muon": run.to("muon"),
        "adamw": run,
        "lamb": dataclasses.replace(run, optimizer="lamb"),
    }
    columns = []
    for name in runs:
        plan = lb.batch_plan(512, total="1M", run=runs[name])
        optimizer = lb.planned_optimizer(plan, params, stacked=stacked)
        cells = {}
        for one in lb.explain(optimizer, params).parameters:
            rate = Fraction(one.rate or 0).limit_denominator(100)
            size = "η" if rate == 1 else f"{rate} η"
            decay = "decay" if one.decayed else "no decay"
            cells[one.name] = f"{one.direction.title()}{STEPS[one.length]}; {size}; {decay}"
        columns.append(cells)
    lines = [*_head(["parameters", *(f"`{name}`" for name in runs)])]
    for name, (words, _) in KINDS.items():
        lines.append(f"| {' | '.join([words, *(cells[name] for cells in columns)])} |")
    return "\n".join(lines)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "recipes.md": {"recipes": recipes_table, "ramps": ramps_table},
    "algorithms/muonh.md": {"movers": movers_table},
    "guides/scaling_rules.md": {"at_32": at_32_table, "rules": rules_table},
    "guides/choosing_a_batch_size.md": {"fit": fits_table},
}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return _with_outputs(with_tables(page, "docs/write_recipes.py", tables))


def _with_outputs(page: str) -> str:
    """The page with what its blocks of code print, one after the other, in one program."""
    names: dict[str, object] = {}

    def ran(match: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(match["code"], names)
        shown = f"\n```text\n{output.getvalue()}```\n" if output.getvalue() else ""
        return f"```python\n{match['code']}```\n{shown}"

    block = re.compile(
        r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE
    )
    return block.sub(ran, page)


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.7g} to {high:.7g}"


if __name__ == "__main__":
    for path, tables in PAGES.items():
        page = DOCS / path
        page.write_text(written(page.read_text(), tables))
