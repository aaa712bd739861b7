"""Limits for the cost of a step; `python -m benchmarks.compiled_step --check` checks them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ROUNDS = {"lamb": 1, "lans": 2, "lars": 1, "adamh": 1}
"""The all-reduces of a step where leaves are split: one for each round of norms."""

# The compiler of a TPU sends at most 256 arrays in one all-reduce. Under automatic partitioning
# each norm is an array, and a round of BERT-base has 203 of them (the first one of LANS), 406 or
# 609; that of AdamH, which takes sums of 77 matrices alone, has 231. Where `update` is told
# `partition_specs` they are one vector.
IN_SEVERAL = {"lamb": 2, "lans": 1 + 3, "lars": 2, "adamh": 1}


class Limit(NamedTuple):
    """The highest cost that a step may have."""

    bytes_for_each_parameter: float
    kernels_for_each_leaf: float = float("inf")
    temporaries_percent: float = float("inf")
    passes_far_apart: float = float("inf")
    calls_of_cublas: float = float("inf")


LIMITS = {
    ("one H100", "bert-base", "lamb"): Limit(40.5, 1.6, 1, 0),
    # Before the last pass over the last leaf but one, the gradient of the largest is read.
    ("one H100", "bert-base", "lans"): Limit(48.5, 3.1, 1, 1),
    ("one H100", "bert-base", "adamh"): Limit(40.5, 1.5, 1, 0),
    # 74 matrices of three shapes, seven in a batch; 150 MB.
    ("one H100", "bert-base", "muon, bfloat16"): Limit(165, 7, 34, calls_of_cublas=200),
    ("one H100", "bert-base", "muonh, bfloat16"): Limit(165, 7, 34, calls_of_cublas=200),
    ("one H100", "bert-base", "lars"): Limit(28.5, 1.5, 1, 0),
    ("one H100", "300 small leaves", "lamb"): Limit(46, 0.7),
    ("one H100", "300 small leaves", "lans"): Limit(51.5, 1),
    ("one H100", "300 small leaves", "lars"): Limit(28.5, 0.3),
    ("one H100", "300 small leaves", "scaled_adam"): Limit(36.5, 0.7),
    ("one H100", "1000 leaves", "lamb"): Limit(46, 0.5),
    ("one H100", "1000 leaves", "lans"): Limit(51.5, 0.8),
    ("one H100", "1000 leaves", "lars"): Limit(28.5, 0.3),
    ("one H100", "1.3B, stacked", "lamb"): Limit(40.5, temporaries_percent=1),
    ("one H100", "1.3B, stacked", "lans"): Limit(48.5, temporaries_percent=1),
    ("one H100", "1.3B, stacked", "lars"): Limit(28.5, temporaries_percent=1),
    ("one H100", "bert-base, masters", "lamb"): Limit(42.5, 3.1, 1, 0),
    ("one H100", "bert-base, masters", "lans"): Limit(46.5, 4.6, 1, 0),
    ("one H100", "bert-base, masters", "lars"): Limit(28.5, 3.1, 1, 0),
    ("one H100", "bert-base, eight micro-batches", "lamb"): Limit(64.5, temporaries_percent=25),
    ("one H100", "bert-base, eight micro-batches", "lans"): Limit(72.5, temporaries_percent=1),
    ("one H100", "bert-base, eight micro-batches", "lars"): Limit(56.5, temporaries_percent=1),
    ("eight H100", "bert-base, specs", "lamb"): Limit(43.5, 0.6, 1),
    ("eight H100", "bert-base, specs", "lans"): Limit(49, 0.95, 1),
    ("eight H100", "bert-base, specs", "lars"): Limit(28.5, 0.55, 1),
    ("eight H100", "1.3B, stacked", "lamb"): Limit(40.5, temporaries_percent=1),
    ("eight H100", "1.3B, stacked", "lans"): Limit(48.5, temporaries_percent=1),
    ("eight H100", "1.3B, stacked", "lars"): Limit(28.5, temporaries_percent=1),
    **{
        (target, "1.3B, stacked", name): Limit(bytes_, temporaries_percent=percent)
        for target, percent in (("v5e 2x4", 2.2), ("v6e 2x4", 2.5), ("v5p 2x2x2", 2.2))
        for name, bytes_ in (("lamb", 40.5), ("lans", 48.5), ("lars", 28.5))
    },
    ("one v5e", "bert-base", "lamb"): Limit(34),
    ("one v5e", "bert-base", "lans"): Limit(36),
    ("one v5e", "bert-base", "lars"): Limit(24.5),
    ("one H100", "two layers", "lamb"): Limit(40.5, 1.9, 1, 0),
    ("one H100", "two layers", "lans"): Limit(48.5, 3.6, 1, 0),
    ("one H100", "two layers", "adamh"): Limit(40.5, 1.9, 1, 0),
    ("one H100", "two layers", "muonh, bfloat16"): Limit(225, calls_of_cublas=60),
    ("one H100", "two layers", "lars"): Limit(28.5, 1.8, 1, 0),
    ("one v5e", "two layers", "lamb"): Limit(34, temporaries_percent=35),
    ("one v5e", "two layers", "lans"): Limit(36, temporaries_percent=40),
    ("one v5e", "two layers", "lars"): Limit(24.5, temporaries_percent=1),
    ("v5e 2x4", "two layers", "lamb"): Limit(34, temporaries_percent=160),
    ("v5e 2x4", "two layers", "lans"): Limit(36, temporaries_percent=210),
    ("v5e 2x4", "two layers", "lars"): Limit(24.5, temporaries_percent=145),
}


def failures(rows: list[Mapping[str, Any]]) -> list[str]:
    """The costs above their limits, a line for each."""
    return [line for row in rows for line in _failures_of(row)]


def _failures_of(row: Mapping[str, Any]) -> Iterator[str]:
    cell = (row["target"], row["case"], row["optimizer"])
    limit = LIMITS.get(cell)
    for name, most in limit._asdict().items() if limit else ():
        if row[name] != "" and row[name] > most:
            yield f"{', '.join(cell)}: {name} is {row[name]}, allowed are {most}"
    if row["optimizer"] in ROUNDS:
        several = not row["target"].startswith("one ")
        is_tpu = row["target"].startswith("v")
        times = IN_SEVERAL if is_tpu and row["case"] == "bert-base" else ROUNDS
        wanted = f"all-reduce:{times[row['optimizer']]}" if several else ""
        if row["collectives"] != wanted:
            yield f"{', '.join(cell)}: collectives are {row['collectives']!r}, not {wanted!r}"
