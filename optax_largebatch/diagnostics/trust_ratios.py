"""The trust ratios of the last step, by name."""

from typing import Any

import jax
import optax

from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacked, check_stacked


def trust_ratios(
    state: Any, params: Any, *, stacked: Stacked | None = None
) -> dict[str, jax.Array]:
    r"""The trust ratio that each parameter had in the last step.

    They stand in the state of the optimizer as one vector, so reading them costs nothing while
    training goes on, and works under `jit` and after a checkpoint is restored.

    Args:
        state: the state of an optimizer of this library, however it is wrapped.
        params: the parameters; only their structure and shapes count.
        stacked: what the optimizer was given.

    Returns:
        By the name of the parameter a scalar, or for one that stacks layers an array with an
        entry for each. An optimizer that adapts two directions, as LANS does, has two for each
        parameter, with the names of the states before that of the parameter:
        `momentum_branch/kernel` and `gradient_branch/kernel`.

    Raises:
        ValueError: there are no trust ratios in the state, or not those of these parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import lamb, trust_ratios
        >>> params = {"bias": jnp.zeros(2), "kernel": jnp.array([3.0, 4.0])}
        >>> optimizer = lamb(0.1)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> print({name: round(float(r), 2) for name, r in trust_ratios(state, params).items()})
        {'bias': 1.0, 'kernel': 3.54}
    """
    stacks = check_stacked(stacked)
    found = optax.tree.get_all_with_path(state, "trust_ratios")
    if not found:
        raise ValueError(
            "state holds no trust ratios. Pass the state of an optimizer with layer-wise "
            f"adaptation, such as lamb, lans or lars; got a {type(state).__name__}."
        )
    names, sizes, axes = leaf_names(params), stacks.sizes(params), stacks.axes(params)
    ratios = {}
    for path, vector in found:
        if vector.shape != (sum(sizes),):
            raise ValueError(
                f"the state holds {vector.shape[0]} trust ratios, and params have {sum(sizes)} "
                "blocks. Pass the parameters and the `stacked` that the optimizer has."
            )
        prefix = f"{_branch(path)}/" if len(found) > 1 else ""
        start = 0
        columns = zip(names, jax.tree.leaves(params), sizes, axes, strict=True)
        for name, leaf, size, own in columns:
            shape = tuple(leaf.shape[axis] for axis in own)
            ratios[prefix + name] = vector[start : start + size].reshape(shape)
            start += size
    return ratios


def _branch(path: tuple[Any, ...]) -> str:
    """The fields of the states on the way to a vector."""
    return "/".join(key.name for key in path[:-1] if hasattr(key, "name"))
