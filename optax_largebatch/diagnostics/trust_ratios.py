"""The trust ratios of the last step, by name."""

from typing import Any

import jax

from optax_largebatch.diagnostics.optimizer_facts import Optimizer, parts_with_ratios
from optax_largebatch.diagnostics.state_parts import OfParameter, by_parameter


def trust_ratios(optimizer: Optimizer, state: Any, params: Any) -> dict[str, jax.Array]:
    r"""The trust ratio that each parameter had in the last step.

    The optimizer knows which parameters stack layers, and which of them it sees. Its state holds
    the ratios as one vector. So reading them costs nothing in a compiled step, and works after a
    checkpoint is restored. Outside of `jit` the optimizer's `init` is traced in each call, but not
    computed.

    Args:
        optimizer: the optimizer, of this library or with one inside. It may be wrapped by optax and
            by this library.
        state: its state, also inside an `nnx.Optimizer` or a `TrainState`, or read back from a
            checkpoint.
        params: the parameters; only their structure and shapes count. Those that `optax.masked` or
            `optax.partition` hide from the optimizer are left out of the result.

    Returns:
        A scalar by the name of each parameter, or an array with an entry for each layer if the
        parameter stacks layers. An optimizer that adapts two directions, as LANS does, has two
        entries for each parameter, named `momentum_branch/kernel` and `gradient_branch/kernel`. If
        several optimizers of a chain adapt a parameter, it has an entry for each, named after the
        place of the optimizer in the state.

    Raises:
        TypeError: `optimizer` is no optimizer; it comes first.
        ValueError: the state holds no trust ratios, does not belong to these parameters or to this
            optimizer, or is that of many models, of `jax.vmap` or `jax.pmap`; or two parameters
            have the same name.

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
    ratios = ratios_of(optimizer, state, params)
    if not ratios:
        raise ValueError(
            "optimizer has no trust ratios. Those with a ratio for each layer are lamb, lans, "
            "lars, larc, lbsgd, and muon with trust_ratio=True; step_metrics(state) has the angles "
            "of muonh and adamh."
        )
    names = [own.name for own, _ in ratios]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"params has several parameters called {min(twice)!r}, so a ratio by name would be "
            "that of one of them. Rename the keys: a key with a slash may look like two keys."
        )
    return {own.name: values for own, values in ratios}


def ratios_of(optimizer: Optimizer, state: Any, params: Any) -> list[tuple[OfParameter, jax.Array]]:
    """The trust ratios of each parameter, part by part; empty if the state has no such part.

    Raises:
        ValueError: the parts do not belong to these parameters, or to this optimizer.
    """
    found = parts_with_ratios(optimizer, state, params)
    return [
        (own, own.part.array("trust_ratios")[own.entries].reshape(own.shape))
        for own in by_parameter(found, "trust_ratios", state, params)
    ]
