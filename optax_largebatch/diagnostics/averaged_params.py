"""The parameters with which a run is evaluated that averages its weights."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.diagnostics.optimizer_facts import Optimizer, block_norms, facts_about
from optax_largebatch.params.owners import nodes_of_kinds, owners
from optax_largebatch.wrappers.weight_average import AverageWeightsState


def averaged_params(optimizer: Optimizer, state: Any, params: Any) -> Any:
    r"""The average of the weights that `average_weights` keeps, to evaluate a run with.

    Where steps stay on a sphere (`muonh`, `adamh`), the average lies inside of it. It is projected
    back: each block gets the norm that it has in `params`. Parameters that `optax.masked` or
    `optax.partition` hides from `average_weights` come back as they are.

    Args:
        optimizer: the optimizer, with `average_weights` inside or outside of other wrappers.
        state: its state after at least one step.
        params: the parameters, which are not changed.

    Returns:
        The average, in the dtypes of the parameters.

    Raises:
        TypeError: `optimizer` is no optimizer; it comes first.
        ValueError: the state holds no average, or several.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import average_weights, averaged_params, muonh
        >>> params = {"kernel": jnp.eye(2)}
        >>> optimizer = average_weights(muonh(0.1), half_life=2)
        >>> state = optimizer.init(params)
        >>> gradient = {"kernel": jnp.array([[0.0, 1.0], [-1.0, 0.0]])}
        >>> updates, state = optimizer.update(gradient, state, params)
        >>> average = averaged_params(optimizer, state, params)
        >>> print(jnp.linalg.norm(average["kernel"]).round(4))
        1.4142
    """
    found = nodes_of_kinds(state, AverageWeightsState)
    if len(found) != 1:
        raise ValueError(
            f"state must hold one average of the weights, got {len(found)}. Put average_weights "
            "around the optimizer, and pass the state that `update` returned."
        )
    average = found[0].fields["average"]
    places: Any = owners(average, params)
    if None in places:
        raise ValueError(
            "params must be the parameters of the optimizer: state has the average of others."
        )
    facts = facts_about(optimizer, params)
    leaves, structure = jax.tree.flatten(params)
    for place, mean in zip(places, jax.tree.leaves(average), strict=True):
        param = leaves[place]
        if facts.of_each[place].get("length") == "sphere":
            wanted, norm = (block_norms(x, *facts.spheres[place]) for x in (param, mean))
            mean = mean * jnp.where(norm > 0, wanted / norm, 1)
        leaves[place] = mean.astype(param.dtype)
    return structure.unflatten(leaves)
