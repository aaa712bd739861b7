"""Writes the tables of costs on the pages that have them, from the committed results.

python -m docs.write_measured
"""

from collections.abc import Callable, Mapping
import csv
from pathlib import Path

from benchmarks.harness.pages import markdown, with_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, str]

STEPS = (
    "optax.adamw", "lars", "eve", "lamb", "scaled_adam", "lans", "cain",
    "optax.lamb", "optax.lars",
    "torch.AdamW, fused", "timm.Lamb", "timm.Lars", "pytorch_optimizer.Lamb",
)  # fmt: skip
TREES = {"bert-base": "BERT-base", "bert-base, stacked": "its layers stacked", "small": "300 small"}
WAYS = {"jit": "`jit`", "jit, specs": "with `partition_specs`", "shard_map": "`shard_map`"}
COMPILED = ("optax.adamw", "lamb", "lans", "lars")
TARGETS = {
    ("one H100", "bert-base"): "BERT-base, one H100",
    ("eight H100", "bert-base"): "BERT-base, eight H100",
    ("eight H100", "bert-base, specs"): "the same, with `partition_specs`",
    ("eight H100", "1.3B, stacked"): "1.3B parameters in stacks, eight H100",
    ("one v5e", "bert-base"): "BERT-base, one TPU v5e",
    ("v5e 2x4", "bert-base"): "BERT-base, TPU v5e 2x4",
    ("v5e 2x4", "bert-base, specs"): "the same, with `partition_specs`",
    ("v5e 16x16", "1.3B, stacked"): "1.3B in stacks, TPU v5e 16x16",
}
ON_MESHES = {
    "BERT-base, rows": "BERT-base, rows",
    "BERT-large stacked, rows": "24 layers stacked, rows",
    "24 layers stacked, 4 x 2": "the same, both axes over 4 x 2",
    "24 layers stacked, rows over 4 x 2": "the same, rows over 4 x 2",
    "7B stacked, 32 x 8": "7B in stacks, both axes over 32 x 8 TPU v5e (ours in bfloat16)",
}
CASES = {
    "300 small leaves": "300 small arrays",
    "bert-base, bfloat16": "parameters in bfloat16",
    "bert-base, masters": "bfloat16, with `master_weights`",
    "bert-base, eight micro-batches": "`accumulate_gradients`, every=8",
}


def read(name: str) -> list[Row]:
    """The rows of a result."""
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def _ratio(row: Row) -> str:
    return f"{float(row['ratio']):.2f}"


def _range(row: Row) -> str:
    return f"{_ratio(row)} ({float(row['ratio_low']):.2f} to {float(row['ratio_high']):.2f})"


def step_cost() -> str:
    """Times of a step over AdamW's, by optimizer and tree, and of a training step."""
    found = {(row["optimizer"], row["tree"]): row for row in read("cpu-2-cores/step_cost.csv")}
    trained = {row["optimizer"]: _ratio(row) for row in read("cpu-2-cores/training_step.csv")}
    return markdown(
        ["x `optax.adamw`", *TREES.values(), "temporary memory, MB", "a training step"],
        [
            [
                f"`{name}`",
                *(_ratio(found[name, tree]) for tree in TREES),
                _megabytes(found[name, "bert-base"]),
                trained.get(name, ""),
            ]
            for name in STEPS
        ],
    )


def h100() -> str:
    """Times of a step on an H100 over AdamW's."""
    rows = sorted(read("nvidia-h100-80gb-hbm3/step_cost.csv"), key=lambda row: float(row["ratio"]))
    return markdown(
        ["BERT-base, one H100", "x `optax.adamw`", "temporary memory, MB"],
        [[f"`{row['optimizer']}`", _range(row), _megabytes(row)] for row in rows],
    )


def _megabytes(row: Row) -> str:
    size = row["temporaries_bytes"]
    return f"{int(size) / 1e6:.1f}" if size else ""


def accumulation() -> str:
    """Times of eight micro-batches of BERT-base."""
    return markdown(
        ["BERT-base", "eight calls", "a call that only adds", "memory, MB"],
        [
            [
                f"`{row['optimizer']}`",
                _ratio(row),
                f"{float(row['waiting']):.2f}",
                _megabytes(row),
            ]
            for row in read("cpu-2-cores/accumulation_cost.csv")
            if row["tree"] == "bert-base"
        ],
    )


def sharded() -> str:
    """All-reduces, and times on eight devices of the largest network."""
    rows = read("cpu-2-cores/sharded_step.csv")
    largest = rows[-1]["width"]
    found = {(row["optimizer"], row["way"]): row for row in rows if row["width"] == largest}
    return markdown(
        ["x `optax.lamb`", "all-reduces", *WAYS.values()],
        [
            [
                f"`{name}`",
                found[name, "jit"]["all_reduces"],
                *(_ratio(found[name, way]) if (name, way) in found else "" for way in WAYS),
            ]
            for name in dict.fromkeys(row["optimizer"] for row in rows)
        ],
    )


def _compiled() -> dict[tuple[str, str, str], Row]:
    rows = read("compiled/compiled_step.csv")
    return {(row["target"], row["case"], row["optimizer"]): row for row in rows}


def _bytes(row: Row) -> str:
    return f"{float(row['bytes_for_each_parameter']):.1f}"


def compiled() -> str:
    """Bytes and all-reduces of compiled steps, by machine."""
    found = _compiled()
    lines = []
    for (target, case), name in TARGETS.items():
        own = [found.get((target, case, optimizer)) for optimizer in COMPILED]
        counts = [row["collectives"].rpartition(":")[2] or "0" if row else "-" for row in own]
        numbers = [_bytes(row) if row else "" for row in own]
        lines.append([name, *numbers, "" if "one" in target else ", ".join(counts)])
    return markdown(["bytes for each parameter", *_names(), "all-reduces"], lines)


def cases() -> str:
    """Bytes of compiled steps, by what stands around the optimizer, with the least possible."""
    found = _compiled()
    return markdown(
        ["bytes (least possible)", *_names(), "temporary memory of `lamb`, %"],
        [
            [
                name,
                *(
                    f"{_bytes(own)} ({own['floor']})"
                    for own in (found["one H100", case, optimizer] for optimizer in COMPILED)
                ),
                f"{float(found['one H100', case, 'lamb']['temporaries_percent']):.0f}",
            ]
            for case, name in CASES.items()
        ],
    )


def muon_on_meshes() -> str:
    """What a step of Muon sends and keeps, with the specs of the parameters and without."""
    found = {
        (row["case"], row["optimizer"]): row
        for row in read("compiled/compiled_muon.csv")
        if row["target"] != "v5e 2x4"
    }
    ways = ("optax.contrib.muon", "muon", "muon, no specs")
    in_bfloat16 = (ways[0], "muon, bfloat16", ways[2])
    return markdown(
        ["eight H100", "`optax.contrib.muon`", "`muon` with specs", "`muon` without specs"],
        [
            [
                name,
                *(
                    _sent_and_kept(found.get((case, optimizer)))
                    for optimizer in (ways if (case, "muon") in found else in_bfloat16)
                ),
            ]
            for case, name in ON_MESHES.items()
        ],
    )


def _sent_and_kept(row: Row | None) -> str:
    """How many collectives a step has, whether all are all-to-alls, and its temporaries."""
    if row is None:
        return ""
    sent = {kind: int(n) for kind, n in (x.split(":") for x in row["collectives"].split())}
    kinds = "all-to-alls" if {*sent} == {"all-to-all"} else "collectives"
    return f"{sum(sent.values())} {kinds}; {row['temporaries_of_own_parameters']}"


def _names() -> list[str]:
    return [f"`{name}`" for name in COMPILED]


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "measured.md": {
        "step cost": step_cost,
        "h100": h100,
        "accumulation": accumulation,
        "sharded": sharded,
        "compiled": compiled,
        "cases": cases,
    },
    "algorithms/muon.md": {"muon on meshes": muon_on_meshes},
}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return with_tables(page, "docs/write_measured.py", tables)


if __name__ == "__main__":
    for path, tables in PAGES.items():
        page = DOCS / path
        page.write_text(written(page.read_text(), tables))
