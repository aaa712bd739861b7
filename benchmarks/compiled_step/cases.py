"""The steps that are compiled: a network, how its numbers are kept, and an optimizer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from benchmarks.harness.optimizers import OPTIMIZERS, made_for
from benchmarks.harness.trees import TREES, Tree, bert, is_shape
import optax_largebatch as lb

OURS = ("lamb", "lans", "lars")
MICRO_BATCHES = 8


def _wrapped(name: str, tree: Tree) -> optax.GradientTransformation:
    return made_for(name, tree)


def _clipped(name: str, tree: Tree) -> optax.GradientTransformation:
    if name.startswith("optax."):
        return optax.chain(optax.clip_by_global_norm(1.0), made_for(name, tree))
    return lb.chain(lb.clip_by_global_norm(1.0), made_for(name, tree))


def _with_masters(name: str, tree: Tree) -> optax.GradientTransformation:
    return lb.master_weights(made_for(name, tree))


def _accumulating(name: str, tree: Tree) -> optax.GradientTransformation:
    return lb.accumulate_gradients(made_for(name, tree), every=MICRO_BATCHES)


class Case(NamedTuple):
    """A network, and what stands around the optimizer."""

    tree: Tree
    floors: Mapping[str, float]
    """The bytes that each parameter's part of a step has to move, by optimizer."""
    make: Callable[[str, Tree], optax.GradientTransformation] = _wrapped
    told: bool = False
    """Whether `update` is told how parameters are split, if they are."""

    def arguments(self, name: str) -> tuple[Any, Any, Any, optax.GradientTransformation]:
        """Parameters, state and gradients without numbers, and the optimizer."""
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, self.tree.dtype),
            self.tree.shapes(),
            is_leaf=is_shape,
        )
        optimizer = self.make(name, self.tree)
        return params, jax.eval_shape(optimizer.init, params), params, optimizer


FLOAT32 = {name: OPTIMIZERS[name].floor for name in OPTIMIZERS}
# A parameter and its gradient are read from bfloat16. AdamW of optax has its moments in bfloat16
# too: 2 2 2 2, and 2 2 2 written. The moments of ours are float32. LAMB reads 2 2 4 4 and writes
# the moments, 4 4; then it reads 4 4 2 and writes 2. LANS reads 2, reads 2 2 4 4, and reads that
# again with 2 4 4 written. LARS reads 2 2, and again with 4, and writes 2 4.
BFLOAT16 = {"optax.adamw": 14, "lamb": 32, "lans": 36, "lars": 18}
# The same with a float32 copy of the parameter in the state; the parameter itself is written, and
# read too, for what an optimizer returns is a difference.
MASTERS = {"optax.adamw": 30, "lamb": 42, "lans": 46, "lars": 28}
# Of the micro-batch that completes a macro-batch. A gradient and the sum are read and the mean is
# written in the place of the sum: 4 4 4. The optimizer takes its step, at a run-time choice, and
# so its update cannot be added to the parameter there: it is written instead of the parameter.
# What the caller adds reads both and writes the parameter: 4 4 4. (A micro-batch that waits moves
# these 24 alone; its update is zero, but a caller who adds it reads and writes the parameter.)
ACCUMULATING = {name: FLOAT32[name] + 24 for name in FLOAT32}
CLIPPED = {name: FLOAT32[name] + 4 for name in ("optax.adamw", "lamb", "lars")} | {"lans": 52}

CASES = {
    "bert-base": Case(TREES["bert-base"], FLOAT32),
    "bert-base, specs": Case(TREES["bert-base"], FLOAT32, told=True),
    "bert-large": Case(TREES["bert-large"], FLOAT32),
    "300 small leaves": Case(TREES["small"], FLOAT32),
    "1000 leaves": Case(TREES["1000 leaves"], FLOAT32),
    "1.3B, stacked": Case(TREES["1.3B, stacked"], FLOAT32),
    "bert-base, clipped": Case(TREES["bert-base"], CLIPPED, _clipped),
    "bert-base, bfloat16": Case(TREES["bert-base, bfloat16"], BFLOAT16),
    "bert-base, masters": Case(TREES["bert-base, bfloat16"], MASTERS, _with_masters),
    "bert-base, eight micro-batches": Case(TREES["bert-base"], ACCUMULATING, _accumulating),
    "two layers": Case(Tree(lambda: bert(2, 768, 2048)), FLOAT32),
}
