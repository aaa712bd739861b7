"""The trust ratios of the last step, by name."""

from typing import Any

import jax

from optax_largebatch.diagnostics.state_parts import OfParameter, by_parameter, parts
from optax_largebatch.params.stacked import Stacked, check_stacked
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.trust_ratio import ScaleByTrustRatioState

LAYER_WISE = (ScaleByTrustRatioState, ScaleByLarsState)
"""The parts of a state that hold trust ratios."""


def trust_ratios(
    state: Any, params: Any, *, stacked: Stacked | None = None
) -> dict[str, jax.Array]:
    r"""The trust ratio that each parameter had in the last step.

    The optimizer's state holds the ratios as one vector. So reading them costs nothing during
    training, and works under `jit` and after a checkpoint is restored.

    Args:
        state: the state of an optimizer of this library, however it is wrapped: by the wrappers of
            optax and of this library, in an `nnx.Optimizer` or a `TrainState`, or read back from a
            checkpoint.
        params: the parameters; only their structure and shapes count. Those that `optax.masked` or
            `optax.partition` hide from the optimizer are left out of the result.
        stacked: the argument of the optimizer.

    Returns:
        A scalar by the name of each parameter, or an array with an entry for each layer if the
        parameter stacks layers. An optimizer that adapts two directions, as LANS does, has two
        entries for each parameter, named `momentum_branch/kernel` and `gradient_branch/kernel`. If
        several optimizers of a chain adapt a parameter, it has an entry for each, named after the
        place of the optimizer in the state.

    Raises:
        ValueError: the state holds no trust ratios, does not belong to these parameters, or is that
            of many models, of `jax.vmap` or `jax.pmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import lamb, trust_ratios
        >>> params = {"bias": jnp.zeros(2), "kernel": jnp.array([3.0, 4.0])}
        >>> optimizer = lamb(0.1)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> print({name: round(float(r), 2) for name, r in trust_ratios(state, params).items()})
        {'bias': 1.0, 'kernel': 3.54}
    """
    ratios = ratios_of(state, params, check_stacked(stacked))
    if not ratios:
        raise ValueError(
            "state holds no trust ratios. Pass the state of an optimizer with layer-wise "
            f"adaptation, such as lamb, lans or lars; got a {type(state).__name__}."
        )
    return {own.name: values for own, values in ratios}


def ratios_of(state: Any, params: Any, stacks: Stacked) -> list[tuple[OfParameter, jax.Array]]:
    """The trust ratios of each parameter, part by part; empty if the state has no such part.

    Raises:
        ValueError: the parts do not belong to these parameters.
    """
    found = parts(state, *LAYER_WISE)
    return [
        (own, own.part.array("trust_ratios")[own.entries].reshape(own.shape))
        for own in by_parameter(found, "trust_ratios", state, params, stacks)
    ]
