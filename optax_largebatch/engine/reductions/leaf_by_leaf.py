"""Rounds on an accelerator that has all of every leaf.

An array that is read twice should still be near for the second time: in the 50 MB of an H100's L2
cache, or in the memory of a TPU's core. So the passes over one leaf follow each other, as on a CPU.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from optax_largebatch.engine.compilation import Key, barrier
from optax_largebatch.engine.reductions.groups import in_groups, in_pieces
from optax_largebatch.engine.reductions.protocol import SumOfLeaf
from optax_largebatch.engine.reductions.xla import XlaReductions

MOST_OF_A_GROUP = 2**18
"""The elements of small leaves that take each pass together, since the cache has all of them."""


class LeafByLeaf(XlaReductions):
    """Each leaf takes all its passes by itself, one after the other; small ones in groups."""

    in_turn = True
    ratios_as_vectors = False

    def groups(self, sizes: Mapping[int, int]) -> list[list[int]]:
        """The leaves, several small ones at a time."""
        return in_groups(sizes, MOST_OF_A_GROUP)

    def ready(self, numbers: Mapping[SumOfLeaf, jax.Array]) -> dict[SumOfLeaf, jax.Array]:
        """The sums as vectors, one for the same sum of several leaves.

        XLA fuses the sums of small leaves into one kernel if they are the parts of one vector.
        """
        ready = dict(numbers)
        alike: dict[object, list[SumOfLeaf]] = {}
        for key, x in numbers.items():
            alike.setdefault((key[1], x.dtype), []).append(key)
        for keys in alike.values():
            for piece in in_pieces(keys):
                if len(piece) > 1:
                    ready |= as_one_vector({key: numbers[key] for key in piece})
        return ready


def as_one_vector(numbers: Mapping[Key, jax.Array]) -> dict[Key, jax.Array]:
    """The same numbers, after they have been in one vector."""
    vector = barrier(jnp.concatenate([jnp.ravel(x) for x in numbers.values()]))
    parts = jax.lax.split(vector, [x.size for x in numbers.values()])
    return {
        key: part.reshape(x.shape) for (key, x), part in zip(numbers.items(), parts, strict=True)
    }
