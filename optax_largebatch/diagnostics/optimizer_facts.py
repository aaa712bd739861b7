"""What an optimizer says of itself and of its trust ratios, however it is wrapped."""

import math
from typing import Any, NamedTuple
import warnings

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.engine.recorded_states import Facts, RecordedState, recorded_states
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.params.likely_stacks import LikelyStack, likely_stacks
from optax_largebatch.params.owners import Keys, StateNode, by_parameter, nodes_of_kinds, owners
from optax_largebatch.params.segments import BlockAxes, Segments
from optax_largebatch.params.shapes import Shape
from optax_largebatch.transforms.trust_ratio import ScaleByLarsState, ScaleByTrustRatioState

LAYER_WISE = (ScaleByTrustRatioState, ScaleByLarsState)
"""The nodes of a state that hold trust ratios."""

Optimizer = optax.GradientTransformation | optax.MultiSteps

STEPS_TO_TRY = (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
"""Where the highest learning rates are looked for."""


class RatioFacts(NamedTuple):
    """What an optimizer says about the trust ratios in a part of its state."""

    blocks: dict[int, BlockAxes]
    """The axes over the blocks of their parameters, by the numbers of these."""
    lengths: dict[int, Shape]
    """The lengths of these axes."""
    facts: dict[int, Facts]
    """What the transform says about the parameters; it adapts those that have a `length`."""


class OptimizerFacts(NamedTuple):
    """What an optimizer says about itself and some parameters."""

    of_each: list[Facts]
    """The `Facts` of each parameter, from all transforms that see it, and `names`, those of other
    libraries' transforms among them; empty where none sees it."""
    axes: list[tuple[int, ...]]
    """The stacked axes of each parameter, as far as they are declared."""
    blocks: list[int]
    """How many blocks each parameter has."""
    ratios: dict[Keys, RatioFacts]
    """What it says about each node of its state with trust ratios, by the node's keys."""
    spheres: dict[int, BlockAxes]
    """The axes over the blocks of each parameter whose blocks stay on spheres, by the numbers of
    the parameters."""
    state: Any
    """The shapes of its first state."""

    @property
    def has_muon(self) -> bool:
        """Whether Muon moves some parameter."""
        return any("matrices" in facts for facts in self.of_each)


def facts_about(optimizer: Any, params: Any) -> OptimizerFacts:
    """What an optimizer says about itself and these parameters.

    Its `init` is traced for that, and nothing is computed.

    Args:
        optimizer: the optimizer, of this library or with one inside.
        params: the parameters, or their shapes.

    Raises:
        TypeError: the first argument is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a gradient transformation, and comes first, as in (optimizer, "
            f"params) and (optimizer, state, params); got a {type(optimizer).__name__}."
        )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
    about = OptimizerFacts([{}] * len(shapes), [()] * len(shapes), [1] * len(shapes), {}, {}, None)

    def look(params: Any) -> Any:
        with recorded_states() as record:
            state = optimizer.init(params)
        nodes = nodes_of_kinds(state, *LAYER_WISE)
        places = {id(node.array("trust_ratios")): node.keys for node in nodes}
        for made in record:
            numbers: Any = owners(made.params, params)
            expected = [None if number is None else shapes[number] for number in numbers]
            # Not if it sees, say, small copies of the parameters.
            if expected == [x.shape for x in jax.tree.leaves(made.params)]:
                keys = places.get(id(getattr(made.state, "trust_ratios", None)))
                _add(about, made, numbers, keys)
        return state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `init` warns of, it has said to the trainer
        return about._replace(state=jax.eval_shape(look, params))


def _add(
    about: OptimizerFacts,
    made: RecordedState,
    numbers: list[int],
    keys: Keys | None,
) -> None:
    """Adds what a transform says; of two directions the first counts, of all else the last.

    Args:
        about: what others have said.
        made: the state of the transform.
        numbers: the parameters that it sees.
        keys: the place of its trust ratios, if it has any.
    """
    transform = made.transform
    params = made.params
    of_each = transform.facts(params) if transform.facts else [{}] * len(numbers)
    is_foreign = not getattr(transform.leaf, "__module__", "").startswith("optax_largebatch.")
    stacks = transform.stacked
    blocks = dict(zip(numbers, stacks.blocks_of(params), strict=True))
    lengths = dict(zip(numbers, stacks.lengths(params), strict=True))
    for number, facts, axes in zip(numbers, of_each, stacks.axes(params), strict=True):
        about.axes[number] = tuple(sorted({*about.axes[number], *axes}))
        about.blocks[number] = max(about.blocks[number], math.prod(lengths[number]))
        if facts.get("length") == "sphere":
            about.spheres[number] = blocks[number]
        if transform.facts or is_foreign:
            before = about.of_each[number]
            new = {name: value for name, value in facts.items() if not isinstance(value, Tracer)}
            if "direction" in before:
                new["direction"] = before["direction"]
            names = before.get("names", ())
            new["names"] = (*names, transform.name) if is_foreign else names
            about.of_each[number] = {**before, **new}
    if keys is not None:
        about.ratios[keys] = RatioFacts(blocks, lengths, dict(zip(numbers, of_each, strict=True)))


def forgotten_stacks(about: OptimizerFacts, params: Any) -> list[LikelyStack]:
    """The stacks that are not declared, where that does harm.

    A stack has one norm for all its layers. Muon takes a stack of biases for a matrix, and leaves a
    stack of matrices to Adam.
    """
    likely = likely_stacks(params, about.axes)
    return [stack for stack in likely if about.has_muon or "length" in about.of_each[stack.number]]


def relative_rates(rates: list[Any]) -> list[float | None]:
    """The highest learning rates, in units of the largest; None where one is not known.

    Args:
        rates: numbers or schedules of the step, or None.
    """
    by_identity = {id(rate): rate for rate in rates}
    highest = {key: _highest(rate) for key, rate in by_identity.items()}
    of_each = [highest[id(rate)] for rate in rates]
    largest = max((x for x in of_each if x is not None), default=0.0)
    return [None if x is None or largest <= 0 else x / largest for x in of_each]


def _highest(rate: Any) -> float | None:
    steps = [jnp.asarray(step, jnp.int32) for step in STEPS_TO_TRY]
    values: list[Any] = [rate(step) for step in steps] if callable(rate) else [rate]
    is_known = not any(x is None or isinstance(x, Tracer) for x in values)
    return max(map(float, values)) if is_known else None


def block_norms(
    x: jax.Array,
    stacked_axes: tuple[int, ...] = (),
    segments: Segments | None = None,
) -> jax.Array:
    """The norm of each block, in a shape that broadcasts.

    Args:
        x: the array.
        stacked_axes: its axes that run over blocks.
        segments: the segments of one of them, if it is cut.
    """
    squares = sum_of_squares(x, stacked_axes)
    if segments is not None:
        squares = segments.spread(segments.sums_of_each(squares))
    return from_sum_of_squares(squares)


class Ratio(NamedTuple):
    """The trust ratios of a parameter in a node of the state."""

    name: str
    number: int
    """The number of the parameter among `jax.tree.leaves(params)`."""
    values: jax.Array
    """A ratio for each layer."""
    blocks: BlockAxes
    """The axes over the layers."""
    facts: Facts
    """What the transform says; it has a `length` if the parameter is adapted."""
    source: StateNode
    """The node of the state that has them."""

    @property
    def of_blocks(self) -> np.ndarray:
        """The same as a vector."""
        return np.ravel(self.values)


def trust_ratios(
    optimizer: Optimizer,
    state: Any,
    params: Any,
) -> dict[str, jax.Array]:
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
            "lars, larc and lbsgd; step_metrics(state) has the angles of muonh and adamh."
        )
    names = [ratio.name for ratio in ratios]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"params has several parameters called {min(twice)!r}, so a ratio by name would be "
            "that of one of them. Rename the keys: a key with a slash may look like two keys."
        )
    return {ratio.name: ratio.values for ratio in ratios}


def ratios_of(facts: OptimizerFacts, state: Any, params: Any) -> list[Ratio]:
    """The trust ratios of each parameter, node by node; empty if the state has no such node.

    Args:
        facts: what the optimizer says.
        state: its state, possibly inside another object, such as a `TrainState`.
        params: the parameters.

    Raises:
        ValueError: the state is not that of the optimizer, or of these parameters.
    """
    nodes = nodes_of_kinds(state, *LAYER_WISE)
    places = [node.keys for node in nodes]
    # An object around the state adds its keys.
    above = max(0, min(map(len, places), default=0) - min(map(len, facts.ratios), default=0))
    heads = {keys[:above] for keys in places}
    if len(heads) > 1 or {keys[above:] for keys in places} != set(facts.ratios):
        raise ValueError(
            f"state must be that of the optimizer, which has {_shown(list(facts.ratios))}; got a "
            f"{type(state).__name__} with {_shown(places)}. Pass the state that this optimizer's "
            "`init` or `update` returned, and the optimizer itself in place of one whose `init` "
            "is compiled."
        )
    lengths = {keys: facts.ratios[keys[above:]].lengths for keys in places}
    ratios = []
    for entry in by_parameter(nodes, "trust_ratios", state, params, known=lengths):
        about = facts.ratios[entry.node.keys[above:]]
        values = entry.node.array("trust_ratios")[entry.entries].reshape(entry.shape)
        blocks = about.blocks[entry.number]
        of_transform = about.facts[entry.number]
        ratios.append(Ratio(entry.name, entry.number, values, blocks, of_transform, entry.node))
    return ratios


def _shown(places: list[Keys]) -> str:
    """Places of trust ratios, for the message."""
    return f"trust ratios at {', '.join(map('/'.join, places))}" if places else "no trust ratios"
