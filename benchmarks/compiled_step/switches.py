"""What each switch of a plan is worth: steps as XLA compiles them with one switch off at a time.

    python -m benchmarks.compiled_step.switches
    python -m benchmarks.compiled_step.switches --target "one v5e"

The plans are in `optax_largebatch/engine/execution_plans.py`. Nothing is timed but the compiler
itself. Writes `switches.csv`.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.compiled_step.__main__ import measure
from benchmarks.compiled_step.targets import TARGETS
from benchmarks.harness import plan_switches
from benchmarks.harness.plan_switches import without
from benchmarks.harness.results import add_output, report
from optax_largebatch.engine.execution_plans import (
    ONE_GPU,
    ONE_TPU,
    SEVERAL_DEVICES,
    SHARDS_ON_GPUS,
    ExecutionPlan,
)

PLANS = {
    ("one H100", "bert-base", "lans"): ONE_GPU,
    ("one H100", "300 small leaves", "lans"): ONE_GPU,
    ("one H100", "1.3B, stacked", "lans"): ONE_GPU,
    ("one H100", "two layers", "lamb"): ONE_GPU,
    ("one H100", "two layers", "adamh"): ONE_GPU,
    ("one v5e", "bert-base", "lans"): ONE_TPU,
    ("eight H100", "two layers", "lans"): SEVERAL_DEVICES,
    ("eight H100", "two layers", "scaled_adam"): SEVERAL_DEVICES,
    ("eight H100", "bert-base, specs", "lans"): SHARDS_ON_GPUS,
    ("v5e 2x4", "two layers", "lans"): SEVERAL_DEVICES,
}
"""Steps, and the plans by which they run."""


def switches_of(plan: ExecutionPlan) -> list[str]:
    """The switches of a plan that are on, for steps without products of matrices."""
    return [name for name in plan_switches.switches_of(plan) if name != "batch_matrices"]


def main() -> None:
    """Compiles and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS)
    add_output(parser, "compiled_step")
    args = parser.parse_args()
    cells = [
        (*cell, name)
        for cell, plan in PLANS.items()
        if cell[0] in (args.target or TARGETS)
        for name in ("", *switches_of(plan))
    ]
    rows = []
    for *cell, name in tqdm(cells, desc="compiling"):
        with without(PLANS[tuple(cell)], name):
            rows.append({"without": name} | measure(*cell))
    report(rows, args.output / "switches.csv")
    print(*lines_of_readme(rows), sep="\n")


def lines_of_readme(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table in the engine's README.md, one for each step."""
    steps: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        step = (row["target"], row["case"], row["optimizer"])
        steps.setdefault(step, {})[row["without"]] = _numbers(row)
    return [_line(step, found) for step, found in steps.items()]


def _line(step: tuple[str, ...], found: Mapping[str, str]) -> str:
    target, case, optimizer = step
    name = {"adamh": "AdamH", "scaled_adam": "ScaledAdam"}.get(optimizer, optimizer.upper())
    own = found[""]
    without = [f"`{switch}`: {x}" for switch, x in found.items() if x != own]
    same = [f"`{switch}`" for switch, x in found.items() if switch and x == own]
    if same:
        without.append(f"the same without {', '.join(same)}")
    case = case.replace("bert", "BERT")
    return f"| {target}, {case}, {name} | {own} | {'; '.join(without)} |"


def _numbers(row: Mapping[str, Any]) -> str:
    """Kernels, bytes and temporaries; then all-reduces, or passes that lie far apart."""
    last = row["collectives"].partition("all-reduce:")[2] or row["passes_far_apart"]
    sizes = (float(row[x]) for x in ("bytes_for_each_parameter", "temporaries_percent"))
    numbers = [str(row["kernels"]), *(f"{x:.1f}" for x in sizes), str(last)]
    return " / ".join(x for x in numbers if x)


if __name__ == "__main__":
    main()
