"""The parameters with which a run is evaluated that averages its weights."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.diagnostics.optimizer_facts import Optimizer, facts_about
from optax_largebatch.diagnostics.state_parts import parts
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.wrappers.weight_average import AverageWeightsState


def averaged_params(optimizer: Optimizer, state: Any, params: Any) -> Any:
    r"""The average of the weights that `average_weights` keeps, to evaluate a run with.

    Where steps stay on a sphere (`muonh`, `adamh`), the average lies inside of it. It is projected
    back: each block gets the norm that it has in `params`.

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
    found = [part.fields["average"] for part in parts(state, AverageWeightsState)]
    if len(found) != 1:
        raise ValueError(
            f"state must hold one average of the weights, got {len(found)}. Put average_weights "
            "around the optimizer, and pass the state that `update` returned."
        )
    about = facts_about(optimizer, params)
    leaves, structure = jax.tree.flatten(params)
    averages = jax.tree.leaves(found[0])
    for index, (param, average) in enumerate(zip(leaves, averages, strict=True)):
        if (about.of_each[index] or {}).get("length") == "sphere":
            now, before = (_norms(x, about.axes[index]) for x in (average, param))
            average = average * jnp.where(now > 0, before / now, 1)
        averages[index] = average.astype(param.dtype)
    return structure.unflatten(averages)


def _norms(x: jax.Array, stacked: tuple[int, ...]) -> jax.Array:
    """The norm of each block, in a shape that broadcasts."""
    return from_sum_of_squares(sum_of_squares(x, stacked))
