"""The trust ratios of the last step, by name."""

from typing import Any, NamedTuple

import jax

from optax_largebatch.arguments import Bounds
from optax_largebatch.diagnostics.optimizer_facts import (
    LAYER_WISE,
    Optimizer,
    OptimizerFacts,
    facts_about,
)
from optax_largebatch.params.owners import Keys, by_parameter, parts_of_kinds


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
    ratios = ratios_of(facts_about(optimizer, params), state, params)
    if not ratios:
        raise ValueError(
            "optimizer has no trust ratios. Those with a ratio for each layer are lamb, lans, "
            "lars, larc, lbsgd, and muon with trust_ratio=True; step_metrics(state) has the angles "
            "of muonh and adamh."
        )
    names = [ratio.name for ratio in ratios]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"params has several parameters called {min(twice)!r}, so a ratio by name would be "
            "that of one of them. Rename the keys: a key with a slash may look like two keys."
        )
    return {ratio.name: ratio.values for ratio in ratios}


class Ratio(NamedTuple):
    """The trust ratios of a parameter in a part of the state."""

    name: str
    number: int
    """The number of the parameter among `jax.tree.leaves(params)`."""
    values: jax.Array
    """A ratio for each layer."""
    axes: tuple[int, ...]
    """The stacked axes."""
    adapted: bool
    bounds: Bounds
    """The bounds on a ratio."""


def ratios_of(facts: OptimizerFacts, state: Any, params: Any) -> list[Ratio]:
    """The trust ratios of each parameter, part by part; empty if the state has no such part.

    Args:
        facts: what the optimizer says.
        state: its state, possibly inside another object, such as a `TrainState`.
        params: the parameters.

    Raises:
        ValueError: the state is not that of the optimizer, or of these parameters.
    """
    found = parts_of_kinds(state, *LAYER_WISE)
    places = [part.keys for part in found]
    # An object around the state adds its keys.
    above = min(map(len, places), default=0) - min(map(len, facts.ratios), default=0)
    heads = {keys[: max(above, 0)] for keys in places}
    if above < 0 or len(heads) > 1 or {keys[above:] for keys in places} != set(facts.ratios):
        raise ValueError(
            f"state must be that of the optimizer, which has {_listed(list(facts.ratios))}; got a "
            f"{type(state).__name__} with {_listed(places)}. Pass the state that this optimizer's "
            "`init` or `update` returned, and the optimizer itself in place of one whose `init` "
            "is compiled."
        )
    said = {keys: facts.ratios[keys[above:]] for keys in places}
    axes = {keys: one.axes for keys, one in said.items()}
    ratios = []
    for one in by_parameter(found, "trust_ratios", state, params, known=axes):
        values, about = one.part.array("trust_ratios"), said[one.part.keys]
        values = values[one.entries].reshape(one.shape)
        adapted = one.number in about.adapted
        ratios.append(
            Ratio(one.name, one.number, values, about.axes[one.number], adapted, about.bounds)
        )
    return ratios


def _listed(places: list[Keys]) -> str:
    """Places of trust ratios, for the message."""
    return f"trust ratios at {', '.join(map('/'.join, places))}" if places else "no trust ratios"
