"""Fields of a state with one number for each block."""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax

from optax_largebatch import norms
from optax_largebatch.engine.compilation import barrier, chunked
from optax_largebatch.engine.state import Field
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.stacked import Stacked, check_stacked


@dataclasses.dataclass(frozen=True)
class VectorOfBlocks(Field):
    """One vector with a number for each block of all parameters.

    The numbers are in the order of `jax.tree.leaves`; for a leaf that stacks layers, in the order
    of its layers.

    The vector is written in each step and not read: a leaf program finds None in its field, and
    returns a number, or one for each block.

    Args:
        stacked: the parameters that stack layers; None for those of the transform.
        initial: the value of all numbers before the first step.
    """

    kind = "per block"
    stacked: Stacked | None = None
    initial: float = 0.0

    def init(self, params: optax.Params) -> jax.Array:
        blocks = sum(check_stacked(self.stacked).sizes(params))
        dtype = norms.accumulation_dtype(*map(jnp.result_type, jax.tree.leaves(params)))
        return replicated(jnp.full(blocks, self.initial, dtype), params)

    def of_transform(self, name: str, stacked: Stacked) -> Field:
        stacked = stacked if self.stacked is None else self.stacked
        return dataclasses.replace(self, name=name, stacked=stacked)

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        return [None] * len(leaves.arrays)

    def join(
        self,
        old: jax.Array,
        leaf_values: list[Any],
        leaves: Leaves,
    ) -> Any:
        """One vector of all leaves, which have a number for each block, one for all, or None.

        A leaf without a gradient has None and keeps its old entries.
        """
        entries: list[Any] = []
        start = 0
        for index, blocks in enumerate(check_stacked(self.stacked).over_blocks(leaves)):
            is_old = leaf_values[index] is None
            value = 0 if is_old else leaf_values[index]
            if blocks.axes or isinstance(value, jax.Array):
                vector = blocks.vector(jnp.asarray(value, old.dtype), index, leaves)
            else:
                vector = np.full(1, value, old.dtype)
            stop = start + vector.size
            entries.append(old[start:stop] if is_old else vector)
            start = stop
        _check_blocks(self.name, old, start)
        return _one_vector(_join_constants(entries)) if entries else old


@dataclasses.dataclass(frozen=True)
class NumberPerBlock(VectorOfBlocks):
    """The same vector for numbers that the next step reads; zeros at first.

    A leaf program finds the numbers of its blocks in an array that broadcasts: it has the axes of
    the leaf, with length 1 for axes that are not stacked, or no axes if the leaf is one block.
    """

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        block_axes = check_stacked(self.stacked).over_blocks(leaves)
        shapes = [blocks.whole_shape(index, leaves) for index, blocks in enumerate(block_axes)]
        _check_blocks(self.name, value, sum(map(math.prod, shapes)))
        leaf_values = []
        start = 0
        for index, (axes, segments) in enumerate(block_axes):
            shape = shapes[index]
            stop = start + math.prod(shape)
            of_leaf = jnp.reshape(value[start:stop], shape)
            start = stop
            if leaves.mesh:
                # XLA would split the vector before it takes slices, and send their edges around.
                of_leaf = jax.lax.with_sharding_constraint(
                    of_leaf, NamedSharding(leaves.mesh, PartitionSpec())
                )
            if segments:
                of_leaf = segments.spread(of_leaf)
            for axis in axes:
                of_leaf = norms.local_shard(of_leaf, axis, leaves.axes_along(index, axis))
            # On a mesh of explicit axes, `jnp.where` takes arrays that are split in the same way.
            spec = norms.explicit_spec(leaves.arrays[index])
            kept = () if segments else axes  # the answers for segments of an axis are whole
            spec = [name if axis in kept else None for axis, name in enumerate(spec)]
            leaf_values.append(norms.with_spec(of_leaf, PartitionSpec(*spec)))
        return leaf_values


def _check_blocks(name: str, vector: jax.Array, blocks: int) -> None:
    """Checks that a vector has an entry for each block."""
    if vector.shape != (blocks,):
        raise ValueError(
            f"the state's {name} must have an entry for each block: it has the shape "
            f"{vector.shape}, and the parameters have {blocks} blocks. It belongs to other "
            "parameters or options, or has an axis for several models. Call `init` of this "
            "optimizer with the whole parameters (outside of shard_map, where a stack is split "
            "between its layers) and the same `stacked`."
        )


def _one_vector(vectors: Sequence[jax.Array]) -> jax.Array:
    """One vector of many, made in chunks.

    XLA: if one kernel waits for hundreds of numbers, a TPU keeps less of the leaves on its chip.
    BERT-base with LAMB then moves 39.9 bytes for each parameter on a v5e, in chunks 31.2. Without
    the barrier XLA would make one kernel of them again.
    """
    chunks = list(map(jnp.concatenate, chunked(vectors)))
    return jnp.concatenate(barrier(chunks)) if len(chunks) > 1 else chunks[0]


def _join_constants(entries: Sequence[Any]) -> list[jax.Array]:
    """The entries, with neighbouring arrays of NumPy joined: XLA sees as few as possible."""
    joined: list[Any] = []
    for is_constant, run in itertools.groupby(entries, lambda x: isinstance(x, np.ndarray)):
        if is_constant:
            joined.append(jnp.asarray(np.concatenate(list(run))))
        else:
            joined += run
    return joined
