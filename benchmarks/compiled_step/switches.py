"""What each switch of a place is worth: steps as XLA compiles them with one switch off at a time.

    python -m benchmarks.compiled_step.switches
    python -m benchmarks.compiled_step.switches --target "one v5e"

A place is a row of the table in `optax_largebatch/engine/places.py`. Nothing is timed but the
compiler itself. Writes `switches.csv`.
"""

import argparse
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

from tqdm import tqdm

from benchmarks.compiled_step.__main__ import measure
from benchmarks.compiled_step.targets import TARGETS
from benchmarks.harness.results import add_output, write_csv
from optax_largebatch.engine import sums
from optax_largebatch.engine.places import ONE_GPU, ONE_TPU, SEVERAL, SEVERAL_GPUS, Place

PLACES = {
    ("one H100", "bert-base", "lans"): ONE_GPU,
    ("one H100", "300 small leaves", "lans"): ONE_GPU,
    ("one H100", "1.3B, stacked", "lans"): ONE_GPU,
    ("one H100", "two layers", "lamb"): ONE_GPU,
    ("one v5e", "bert-base", "lans"): ONE_TPU,
    ("eight H100", "two layers", "lans"): SEVERAL_GPUS,
    ("eight H100", "two layers", "scaled_adam"): SEVERAL_GPUS,
    ("eight H100", "bert-base, told", "lans"): SEVERAL_GPUS,
    ("v5e 2x4", "two layers", "lans"): SEVERAL,
}
"""Steps, and where they run."""

OFF: dict[str, Any] = {
    "sums": sums.plain,
    "in_turn": False,
    "small_first": False,
    "side_by_side": "never",
    "numbers_as_vectors": False,
    "writes_late": False,
    "sums_wait": False,
    "vectors_in_pieces": False,
}
"""Each switch as it is when it is off. Those of a CPU are in `benchmarks.versions --without`."""

COLUMNS = {
    "target": 11,
    "case": 18,
    "optimizer": 12,
    "without": 19,
    "kernels": 8,
    "bytes_for_each_parameter": 8,
    "temporaries_percent": 8,
    "passes_far_apart": 6,
    "collectives": 16,
    "compile_cpu_s": 8,
}


def switches_of(place: Place) -> list[str]:
    """The switches that are on in a place."""
    return [name for name, off in OFF.items() if getattr(place, name) != off]


@contextlib.contextmanager
def without(place: Place, name: str) -> Iterator[None]:
    """One switch off, of a place that is frozen for everybody else."""
    before = dataclasses.asdict(place)
    try:
        if name:
            object.__setattr__(place, name, OFF[name])
        yield
    finally:
        for own, value in before.items():
            object.__setattr__(place, own, value)


def main() -> None:
    """Compiles, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS)
    add_output(parser, "compiled_step")
    args = parser.parse_args()
    cells = [
        (*cell, name)
        for cell, place in PLACES.items()
        if cell[0] in (args.target or TARGETS)
        for name in ("", *switches_of(place))
    ]
    rows = []
    for *cell, name in tqdm(cells, desc="compiling"):
        with without(PLACES[tuple(cell)], name):
            rows.append({"without": name} | measure(*cell))
        write_csv(
            [{own: row[own] for own in (*COLUMNS, "versions")} for row in rows],
            args.output / "switches.csv",
        )
    heads = ["target", "case", "optimizer", "without", "kernels", "bytes", "temp. %", "apart"]
    lines = [
        [*heads, "collectives", "compile"],
        *([str(row[own]) for own in COLUMNS] for row in rows),
    ]
    for line in lines:
        print("  ".join(x.ljust(n) for x, n in zip(line, COLUMNS.values(), strict=True)).rstrip())


if __name__ == "__main__":
    main()
