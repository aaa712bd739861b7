"""What is one matrix, and in which dtype it is iterated: queries, keys and values, and MuonH.

    python -m benchmarks.muonh_varied --keep       # twenty minutes on two CPU cores
    python -m benchmarks.muonh_varied --report     # only the table

The causal model of `benchmarks.tuned` with its three matrices of attention in one array, as most
programs have them. MuonH takes this array for one matrix, for three, or for one for each head, with
the settings that a search chose for three matrices, and the same seeds and numbers of steps. It
also iterates three matrices in 16 bits.
Writes one line for each run; the same command after an interruption continues.
"""

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.harness.command import run_and_show
from benchmarks.harness.pages import markdown
from benchmarks.harness.results import append, read
from benchmarks.tuned import causal
from benchmarks.tuned.arms import ARMS, Arm, muonh
from benchmarks.tuned.causal import CausalModel
from benchmarks.tuned.intervals import over_the_first
from benchmarks.tuned.search import Settings
from benchmarks.tuned.training import compiled
from benchmarks.tuned.workloads import CAUSAL, HELD_OUT

CHOSEN = {
    "512": Settings(0, 0.2, 0.0, 0.8484),
    "2048": Settings(4, 0.3557, 0.0, 0.8108),
}
"""What an earlier search, of 16 trials, chose for three matrices."""
SEEDS = range(2, 7)
NAMES = ("query", "key", "value")
MATRICES = len(NAMES) * causal.SMALL.heads
THREE = {"matrix_axes": {"qkv/kernel": "layers rows (3 columns)"}}
WAYS: dict[str, dict[str, Any]] = {
    "three matrices": THREE,
    "one matrix": {},
    "one for each head": {"matrix_axes": {"qkv/kernel": f"layers rows ({MATRICES} columns)"}},
    "three in bfloat16": THREE | {"ns_dtype": "bfloat16"},
    "three in float16": THREE | {"ns_dtype": "float16"},
}


class FusedModel(CausalModel):
    """The model with queries, keys and values in one array; it starts with the same numbers."""

    def init(self, key: jax.Array) -> Any:
        """The parameters, with an array `qkv` in each layer."""
        params = super().init(key)
        layers = params["layers"]
        three = [layers.pop(name) for name in NAMES]
        fused = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, -1), *three)
        return params | {"layers": layers | {"qkv": fused}}

    def hidden(self, params: Any, tokens: jax.Array) -> jax.Array:
        """What comes out of the last layer, for every token."""
        parts = jax.tree.map(lambda array: jnp.split(array, 3, -1), params["layers"]["qkv"])
        three = {
            name: {kind: arrays[k] for kind, arrays in parts.items()}
            for k, name in enumerate(NAMES)
        }
        return super().hidden(params | {"layers": params["layers"] | three}, tokens)


@functools.cache
def arm(way: str) -> Arm:
    """MuonH as in `benchmarks.tuned`, with the arguments of a way."""
    return ARMS["muonh"]._replace(build=functools.partial(muonh, **WAYS[way]))


class Row(NamedTuple):
    """A run: a line of the table."""

    batch: str
    way: str
    seed: int
    test_loss: float


def run(path: Path) -> None:
    """Runs what is left, and appends it to the table."""
    model = FusedModel(causal.SMALL, HELD_OUT)
    done = {row[:3] for row in read(path, Row)}
    cells = itertools.product(CHOSEN, WAYS, SEEDS)
    for batch, way, seed in tqdm([cell for cell in cells if cell not in done], unit="run"):
        trained = compiled(model, arm(way), side_by_side=1)
        (losses,) = trained(CAUSAL.plans[batch], [(CHOSEN[batch], seed)])
        append(path, Row(batch, way, seed, losses.test))


def table(rows: list[Row]) -> str:
    """The losses of three matrices in float32, and the differences of the others from them."""
    lines = over_the_first(rows, [(batch,) for batch in CHOSEN], WAYS)
    return markdown(["batch", *WAYS], lines)


EXPLANATION = """\
Written by `python -m benchmarks.muonh_varied --report`: test loss with MuonH, in the mean over five
seeds. The others are differences from it, seed by seed: below 0 is better. In brackets is the
interval of Student's distribution that holds 95%; in bold those that leave out 0."""


def written(path: Path) -> str:
    """The page beside a table, as it is written."""
    text = f"# What is one matrix, and its dtype\n\n{EXPLANATION}\n\n{table(read(path, Row))}\n"
    path.with_suffix(".md").write_text(text)
    return text


if __name__ == "__main__":
    run_and_show("muonh_varied", __doc__, run, written)
