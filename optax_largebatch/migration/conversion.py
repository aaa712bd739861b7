"""What a function from old to new parameters does to all that a state keeps of them.

It is run on marks, numbers that use each bit of a float32. A number that it copies is a mark again,
and one that it makes of several, or rounds, is none.
"""

from collections.abc import Callable, Iterable
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacked

_MARKS = 2**23
"""How many marks there are, and the least of them."""


class Conversion:
    """A user's function from old to new parameters, and where the numbers that it copies are."""

    def __init__(
        self,
        convert: Callable[[Any], Any],
        old_params: Any,
        params: Any,
    ):
        """Runs the function on marks.

        Args:
            convert: the function.
            old_params: the old parameters.
            params: the new ones.

        Raises:
            ValueError: it makes other parameters than `params`, or numbers that are no copies.
        """
        self.convert = convert
        self.old_leaves, self.old_structure = jax.tree.flatten(old_params)
        self.params = params
        rng = np.random.default_rng(0)
        marks = [rng.integers(_MARKS, 2 * _MARKS, np.shape(x)) for x in self.old_leaves]
        owners = [np.full(np.shape(x), k) for k, x in enumerate(self.old_leaves)]
        self.copied: list[np.ndarray] = []
        """Which elements of each new parameter are copies; the others are new."""
        self.sources: list[set[int]] = []
        """The numbers of the old parameters that each new one has elements of."""
        converted = map(self._converted, (marks, map(_changed, marks), owners))
        for name, mark, changed, owner in zip(leaf_names(params), *converted, strict=True):
            is_copied = changed == _changed(mark)
            if not np.all(is_copied | (changed == mark) & np.isfinite(mark)):
                raise ValueError(
                    "convert must copy numbers, and not compute, cast or draw them: some of "
                    f"{name!r} are no copies, and a second moment would not follow. It is asked "
                    "only where each number comes from: let it put zeros there."
                )
            self.copied.append(is_copied)
            self.sources.append(set(owner[is_copied].astype(int).ravel().tolist()))

    def carried(
        self, values: dict[int, Any], begin: dict[int, Any] | None = None
    ) -> dict[int, Any]:
        """Arrays like the old parameters as arrays like the new ones.

        Args:
            values: the array of each old parameter that has one, by its number.
            begin: what stands in new elements, by the number of the new parameter; None for 0.

        Returns:
            The array of each new parameter all of whose sources have one.
        """
        given = [values.get(k, x) for k, x in enumerate(self.old_leaves)]
        arrays = enumerate(jax.tree.leaves(self.convert(self.old_structure.unflatten(given))))
        return {
            k: x if self.copied[k].all() else jnp.where(self.copied[k], x, (begin or {}).get(k, 0))
            for k, x in arrays
            if self.sources[k] <= values.keys()
        }

    def of_blocks(
        self,
        values: dict[int, Any],
        ids: dict[int, Any],
        at_first: dict[int, Any],
        new_ids: dict[int, Any],
        is_whole: bool,
    ) -> dict[int, Any]:
        """Numbers of the new blocks: those of the old blocks that they lie in.

        Args:
            values: the numbers of the blocks of old parameters.
            ids: the `block_ids` of these.
            at_first: the numbers of the blocks of new parameters, for blocks that lie in no one.
            new_ids: the `block_ids` of these.
            is_whole: whether a block must be one old block, and not a part of it.
        """
        sizes = {k: np.bincount(ids[k].ravel())[ids[k]] for k in values}
        of_elements = self.carried({k: x[ids[k]] for k, x in values.items()})
        old_sizes = self.carried(sizes)
        carried = {}
        for number in at_first.keys() & of_elements.keys():
            new = new_ids[number]
            value = np.asarray(of_elements[number])
            of_blocks = at_first[number].copy()
            of_blocks[new] = value
            is_other = ~self.copied[number] | (value != of_blocks[new])
            if is_whole:
                is_other |= old_sizes[number] != np.bincount(new.ravel())[new]
            others = new[is_other]
            of_blocks[others] = at_first[number][others]
            carried[number] = of_blocks
        return carried

    def _converted(self, arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
        """What the function makes of arrays like the old parameters."""
        given = [jnp.asarray(x, jnp.float32) for x in arrays]
        new = self.convert(self.old_structure.unflatten(given))
        expected, made = (jax.tree.map(np.shape, tree) for tree in (self.params, new))
        if made != expected:
            raise ValueError(
                "convert must return a tree with the structure and the shapes of params: it "
                f"returned {made}, and params have {expected}."
            )
        return [np.asarray(jax.device_get(x), np.float64) for x in jax.tree.leaves(new)]


def _changed(marks: np.ndarray) -> np.ndarray:
    """Other marks in the place of marks, in the reverse order, and not evenly.

    So the larger of two marks becomes the smaller, and no sum or product of marks changes likewise.
    """
    return 2 * _MARKS - 1 - np.floor((marks - _MARKS) ** 2 / _MARKS)


def block_ids(stacked: Stacked, params: Any) -> list[np.ndarray]:
    """For each element of each parameter, the number of its block in it."""
    of_leaves = []
    for leaf, blocks in zip(jax.tree.leaves(params), stacked.blocks_of(params), strict=True):
        shape = blocks.shape(np.shape(leaf))
        ids = np.arange(math.prod(shape)).reshape(shape)
        if blocks.segments:
            ids = np.take(ids, blocks.segments.ids, blocks.segments.axis)
        of_leaves.append(np.broadcast_to(ids, np.shape(leaf)))
    return of_leaves
