"""The optimizers whose steps are timed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from benchmarks.harness.trees import Tree
import optax_largebatch as lb


class Optimizer(NamedTuple):
    """An optimizer and what it has to move."""

    make: Callable[..., optax.GradientTransformation]
    """Takes `stacked`, if it is one of ours."""
    floor: int
    """Bytes for each float32 parameter, read and written, if no pass could use a cache."""


def _matrices(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "embeddings" not in str(path), params)


def _muon(**own: Any) -> optax.GradientTransformation:
    return lb.muon(1e-3, weight_decay=0.01, consistent_rms=0.2, matrix_mask=_matrices, **own)


def _muonh(**own: Any) -> optax.GradientTransformation:
    return lb.muonh(1e-3, matrix_mask=_matrices, **own)


# AdamW reads p, g, m, v and writes p, m, v: 28. A norm of p or g before that is 4 more, and norms
# between the moments and the step have p, m and v read again. Ours are looked up when they are
# built: an older version of the library need not have them all.
# Muon reads g and m, writes m and the direction, and then reads the result of its products and p,
# and writes p: 28, as Adam for the embeddings. MuonH takes the norms of the result and of p before
# that: 8 more. The products are not in these bytes: `x floor` says what they cost.
OPTIMIZERS = {
    "optax.adamw": Optimizer(lambda: optax.adamw(1e-3, weight_decay=0.01), 28),
    "optax.lamb": Optimizer(lambda: optax.lamb(1e-3, weight_decay=0.01), 40),
    "optax.lars": Optimizer(lambda: optax.lars(1e-3, weight_decay=0.01), 28),
    "lamb": Optimizer(lambda **own: lb.lamb(1e-3, weight_decay=0.01, **own), 40),
    "lans": Optimizer(lambda **own: lb.lans(1e-3, weight_decay=0.01, **own), 48),
    "lars": Optimizer(lambda **own: lb.lars(1e-3, weight_decay=0.01, **own), 28),
    "larc": Optimizer(lambda **own: lb.larc(1e-3, weight_decay=0.01, **own), 28),
    "lbsgd": Optimizer(
        lambda **own: lb.lbsgd(
            1e-3, momentum=0.9, weight_decay=0.01, warmup_strategy="lars", **own
        ),
        28,
    ),
    "adamh": Optimizer(lambda **own: lb.adamh(1e-3, **own), 40),
    "eve": Optimizer(lambda **own: lb.eve(1e-3, **own), 32),
    "cain": Optimizer(lambda **own: lb.cain(1e-3, **own), 40),
    "scaled_adam": Optimizer(lambda **own: lb.scaled_adam(1e-3, **own), 36),
    "muon": Optimizer(_muon, 28),
    "muon, bfloat16": Optimizer(lambda **own: _muon(ns_dtype="bfloat16", **own), 28),
    "muonh": Optimizer(_muonh, 36),
    "muonh, bfloat16": Optimizer(lambda **own: _muonh(ns_dtype="bfloat16", **own), 36),
}
BASELINE = "optax.adamw"
MULTIPLYING = ("muon", "muon, bfloat16", "muonh", "muonh, bfloat16")
"""A CPU takes half a minute for their products in BERT-base, so they run if they are named."""


def made_for(name: str, tree: Tree) -> optax.GradientTransformation:
    """The optimizer; one of ours is told which layers are stacked."""
    ours = "." not in name
    if ours and tree.stacked is not None:
        return OPTIMIZERS[name].make(stacked=lb.stacked_layers(tree.stacked))
    return OPTIMIZERS[name].make()
