"""Where the arrays of a state lie that are like no parameter."""

from typing import TypeVar

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
import optax

Tree = TypeVar("Tree")


def replicated(tree: Tree, params: optax.Params) -> Tree:
    """The same arrays on every device of the parameters' mesh, if the parameters are on one.

    `init` outside of `jax.jit` would leave them on one device. A checkpoint that is restored to
    where each array was would then have arrays on one device beside those on many, which no
    compiled step takes.

    Args:
        tree: new arrays.
        params: the parameters.
    """
    for param in jax.tree.leaves(params):
        if isinstance(param, jax.Array) and not isinstance(param, Tracer):
            sharding = param.sharding
            if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
                return jax.device_put(tree, NamedSharding(sharding.mesh, PartitionSpec()))
    return tree
