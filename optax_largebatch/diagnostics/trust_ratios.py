"""The trust ratios of the last step, by name."""

from typing import Any, overload

import jax

from optax_largebatch.diagnostics.of_optimizer import Optimizer, layer_wise_parts, optimizer_first
from optax_largebatch.diagnostics.state_parts import OfParameter, by_parameter
from optax_largebatch.params.stacked import Stacks, check_stacked


@overload
def trust_ratios(
    optimizer: Optimizer, state: Any, params: Any, *, stacked: Stacks = None
) -> dict[str, jax.Array]: ...


@overload
def trust_ratios(state: Any, params: Any, *, stacked: Stacks = None) -> dict[str, jax.Array]: ...


def trust_ratios(  # pyright: ignore[reportInconsistentOverload]
    optimizer: Any = None,
    state: Any = None,
    params: Any = None,
    *,
    stacked: Stacks = None,
) -> dict[str, jax.Array]:
    r"""The trust ratio that each parameter had in the last step.

    Call it as `trust_ratios(optimizer, state, params)`. The optimizer knows which parameters stack
    layers, and which of them it sees. `trust_ratios(state, params)` needs the argument `stacked` if
    the optimizer has it.

    The optimizer's state holds the ratios as one vector. So reading them costs nothing in a
    compiled step, and works after a checkpoint is restored. Outside of `jit` the optimizer's `init`
    is traced in each call, but not computed.

    Args:
        optimizer: the optimizer, of this library or with one inside. It may be wrapped by optax and
            by this library.
        state: its state, also inside an `nnx.Optimizer` or a `TrainState`, or read back from a
            checkpoint.
        params: the parameters; only their structure and shapes count. Those that `optax.masked` or
            `optax.partition` hide from the optimizer are left out of the result.
        stacked: the argument of the optimizer, if the optimizer is not given.

    Returns:
        A scalar by the name of each parameter, or an array with an entry for each layer if the
        parameter stacks layers. An optimizer that adapts two directions, as LANS does, has two
        entries for each parameter, named `momentum_branch/kernel` and `gradient_branch/kernel`. If
        several optimizers of a chain adapt a parameter, it has an entry for each, named after the
        place of the optimizer in the state.

    Raises:
        TypeError: an argument has the wrong type, or the state or the parameters are missing.
        ValueError: the state holds no trust ratios, does not belong to these parameters or to this
            optimizer, or is that of many models, of `jax.vmap` or `jax.pmap`; or the optimizer has
            other stacks than `stacked`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import lamb, trust_ratios
        >>> params = {"bias": jnp.zeros(2), "kernel": jnp.array([3.0, 4.0])}
        >>> optimizer = lamb(0.1)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> ratios = trust_ratios(optimizer, state, params)
        >>> print({name: round(float(ratio), 2) for name, ratio in ratios.items()})
        {'bias': 1.0, 'kernel': 3.54}
    """
    optimizer, state, params = optimizer_first(optimizer, state, params)
    ratios = ratios_of(optimizer, state, params, stacked)
    if not ratios:
        raise ValueError(
            "state holds no trust ratios. Pass the state of an optimizer with layer-wise "
            f"adaptation, such as lamb, lans or lars; got a {type(state).__name__}."
        )
    return {own.name: values for own, values in ratios}


def ratios_of(
    optimizer: Optimizer | None, state: Any, params: Any, stacked: Stacks
) -> list[tuple[OfParameter, jax.Array]]:
    """The trust ratios of each parameter, part by part; empty if the state has no such part.

    Raises:
        ValueError: the parts do not belong to these parameters, or to this optimizer.
    """
    stacks = check_stacked(stacked)
    found = layer_wise_parts(optimizer, state, params, stacked)
    or_pass = ", or the optimizer as the first argument" if optimizer is None else ""
    return [
        (own, own.part.array("trust_ratios")[own.entries].reshape(own.shape))
        for own in by_parameter(found, "trust_ratios", state, params, stacks, or_pass=or_pass)
    ]
