"""Whether the moments of two optimizers mean the same, found by running both."""

from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from optax_largebatch.migration.moments import MICRO_STEPS, Kept, counters
from optax_largebatch.params.owners import nodes_of, nodes_of_kinds
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState

_STEPS = 3
"""Enough for a warm-up to leave 0, and for the moments of Yogi to leave those of Adam."""

_MOST = 2**26
"""The elements of parameters that are compared at their true lengths: six times 256 MiB."""


_MOMENTS = (
    "Averages may be over other windows (b1, b2, beta), but must be of the same numbers: give both "
    "the same clipping, the same decay before the moments and the same grad_averaging. Where that "
    "cannot be, begin with optimizer.init(params), or leave old_optimizer out to take the moments "
    "as they are."
)
_BUFFERS = (
    "Give both the same momentum of the same numbers: optax.sgd and accumulate_momentum sum "
    "gradients, optax.lars and lars sum steps. Or begin with optimizer.init(params)."
)


def compare_moments(
    old_optimizer: Any,
    optimizer: Any,
    old: Kept,
    steps: int,
) -> None:
    """Checks that two optimizers keep the same moments of the same gradients.

    Or averages over other windows: after t steps an average has the mass 1 - b^t, which a bias
    correction divides by. The old moments are multiplied, so that they stay the same averages.

    Both take some steps from their beginning. The parameters have the tree of the real ones and as
    many axes, but they are short, and float32 so that small differences are seen.

    Args:
        old_optimizer: the old optimizer.
        optimizer: the new one.
        old: what is in the state that should be that of `old_optimizer`.
        steps: the number of steps so far.

    Raises:
        ValueError: it is not, the moments differ, or an optimizer cannot take a step.
    """
    params = old.params
    # Optimizers of other libraries need implicit casts and transfers. All warnings about parameters
    # were given for the real ones.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        expected = Kept("old_optimizer", params, jax.eval_shape(old_optimizer.init, params))
        for number, keeps in enumerate(expected.moments):
            kept, held = (x.what if x else "no moments" for x in (keeps, old.moments[number]))
            if kept != held and number not in old.forgotten:
                raise ValueError(
                    "old_optimizer must be the optimizer that state is of: of "
                    f"{old.names[number]!r} it keeps {kept}, and state has {held}."
                )
        short, gradients = _short(params, optimizer)
        theirs = _moments("old_optimizer", old_optimizer, short, gradients)
        ours = _moments("optimizer", optimizer, short, gradients)
    for number, position in sorted(theirs.keys() & ours.keys()):
        old_field, before = theirs[number, position]
        field, after = ours[number, position]
        if number in old.forgotten or not _differ(before, after):
            continue
        rates = _decay_rates(before, after)
        if rates is None:
            at = np.unravel_index(np.abs(after - before).argmax(), after.shape)
            raise ValueError(
                "old_optimizer must keep the moments that optimizer keeps: in step "
                f"{at[0] + 1} with the same gradients, an element of {field} of "
                f"{old.names[number]!r} is {before[at]:.4g} in old_optimizer and {after[at]:.4g} "
                f"in optimizer. {_BUFFERS if field == 'trace' else _MOMENTS}"
            )
        old_mass, mass = (1 - rate ** max(steps, 1) for rate in rates)
        moment: Any = old.moments[number]
        moment.arrays[old_field] = moment.arrays[old_field] * (mass / old_mass)


def _differ(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether two moments differ by more than rounding."""
    tolerance = max(1e-4, *(8 * float(jnp.finfo(x.dtype).eps) for x in (new, old)))
    return not np.abs(new - old).max(initial=0) <= tolerance * np.abs(old).max(initial=0)


def _decay_rates(
    old: np.ndarray,
    new: np.ndarray,
) -> tuple[float, float] | None:
    r"""The decay rates of two averages of the same numbers; None if they are none.

    From :math:`m_t = b m_{t-1} + (1 - b) x_t` and :math:`n_t = c n_{t-1} + (1 - c) x_t` without the
    :math:`x_t`: with :math:`r = (1 - c) / (1 - b)`,
    :math:`n_t - r m_t = c n_{t-1} - r b m_{t-1}`, which is :math:`r (c - b) m_1` for the second.
    """
    exact, new_exact = (x.astype(complex) for x in (old, new))
    first = exact[0]
    square = np.vdot(first, first).real
    ratio = np.vdot(first, new_exact[0]).real / square if square else 1.0
    if not ratio or abs(ratio - 1) < 1e-6:
        return None
    difference = np.vdot(first, new_exact[1] - ratio * exact[1]).real / (ratio * square)
    old_rate = 1 + difference / (ratio - 1)
    rates = old_rate, old_rate + difference
    expected = ratio * exact
    expected[1:] += rates[1] * new_exact[:-1] - ratio * old_rate * exact[:-1]
    if not all(0 <= rate < 1 - 1e-6 for rate in rates) or _differ(expected, new):
        return None
    return rates


def _short(params: Any, optimizer: Any) -> tuple[Any, list[Any]]:
    """Short parameters and the gradients of some steps.

    Lengths that differ still do: axes of equal length would look like those of a stack. A text that
    cuts an axis needs its true length; then all are true.
    """
    lengths = {length for leaf in jax.tree.leaves(params) for length in np.shape(leaf)} | {0, 1}
    shorter = {length: rank for rank, length in enumerate(sorted(lengths))}
    rng = np.random.default_rng(0)

    def like(leaf: Any) -> jax.Array:
        shape = [shorter[length] for length in np.shape(leaf)]
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    short = jax.tree.map(like, params)
    try:
        optimizer.init(short)
    except ValueError as error:
        if sum(map(np.size, jax.tree.leaves(params))) > _MOST:
            raise ValueError(_no_step("optimizer", error)) from None
        shorter = {length: length for length in lengths}
        short = jax.tree.map(like, params)
    # Long enough to be clipped where that is done.
    return short, [jax.tree.map(lambda x: 3 * like(x), params) for _ in range(_STEPS)]


def _moments(
    who: str,
    optimizer: Any,
    params: Any,
    gradients: list[Any],
) -> dict[tuple[int, int], tuple[str, np.ndarray]]:
    """The moments of an optimizer after each of its first steps, (steps, *shape), and their fields.

    Their key is the number of the parameter, and 0 for a first moment or 1 for a second.

    Args:
        who: the optimizer, for messages.
        optimizer: it.
        params: the parameters, which stay as they are.
        gradients: those of each step.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def update(gradients: Any, state: Any) -> Any:
        # These parameters are whole, however the real ones are split.
        return optimizer.update(gradients, state, params, partition_specs=PartitionSpec())[1]

    state = optimizer.init(params)
    of_steps: list[list[Any]] = []
    for gradient in gradients:
        state = _after_a_step(who, update, gradient, state)
        of_steps.append(Kept(who, params, state).moments)
    return {
        (number, position): (field, np.stack([step[number].arrays[field] for step in of_steps]))
        for number, moment in enumerate(of_steps[0])
        for position, field in enumerate(moment.arrays if moment else ())
    }


def _after_a_step(who: str, update: Any, gradient: Any, state: Any) -> Any:
    """The state after a step, with the same gradient for all parts of a macro-batch."""
    before = 0
    while True:
        scales = [node.array("loss_scale") for node in nodes_of_kinds(state, DynamicLossScaleState)]
        scaled = jax.tree.map(lambda x, scales=scales: x * np.prod(scales), gradient)
        try:
            state = update(scaled, state)
        except Exception as error:  # an optimizer of anybody's, which may want more arguments
            raise ValueError(_no_step(who, error)) from error
        held = sum(
            int(number)
            for node in nodes_of(state)
            for number in counters(node, MICRO_STEPS).values()
        )
        if not held:
            return state
        if held <= before:
            raise ValueError(_no_step(who, "it leaves a micro-batch out."))
        before = held


def _no_step(who: str, why: Any) -> str:
    return (
        f"{who} could not take a step with gradients and parameters alone: {why} Leave "
        "old_optimizer out, and compare the settings of the two optimizers yourself."
    )
