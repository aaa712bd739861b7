"""The size of each tensor, learned apart from its direction."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import arguments, engine
from optax_largebatch.arguments import Bounds, Scalar
from optax_largebatch.engine.requests import in_one_round
from optax_largebatch.numerics import bias_correction, quotient, root
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements


class LearnLogScaleState(NamedTuple):
    """State of `learn_log_scale`.

    All but the count are vectors with a number for each block, in the order of `jax.tree.leaves`;
    for a leaf that stacks layers, in the order of its layers.
    """

    count: jax.Array
    """Steps taken, shape ()."""
    total: jax.Array
    """Sum over this period of the derivatives with respect to the log scale."""
    total_of_squares: jax.Array
    """Sum over this period of the squares of these derivatives."""
    mu: jax.Array
    """First moment of the derivative."""
    nu: jax.Array
    """Second moment of the derivative."""


def learn_log_scale(
    learning_rate: Hyperparameter,
    *,
    b1: Scalar = 0.0,
    b2: Scalar = 0.98,
    eps: Scalar = 1e-8,
    speed: Scalar = 0.1,
    period: int = 1,
    max_change: Scalar | None = None,
    rms_bounds: Bounds = None,
    at_bounds: Literal["stop", "return"] = "stop",
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Learns the size of each block: RMSprop on the logarithm of its scale.

    For :math:`w = e^\ell \bar w` the derivative with respect to :math:`\ell` is
    :math:`s = \sum w g`. It is collected over the :math:`T` steps of a period. In the last of
    these, step :math:`t` of the run,

    .. math::

        \mu &\leftarrow b_1^T \mu + (1 - b_1^T) \operatorname{mean}(s), \qquad
        \nu \leftarrow b_2^T \nu + (1 - b_2^T) \operatorname{mean}(s^2) \\
        u &= -T \eta_t \gamma \sqrt{1 - b_2^t} \, \frac{\mu}{\sqrt{\nu} + \epsilon} \, w

    In the other steps, and for blocks of one element, :math:`u = 0`. The result is a step, not a
    direction, so no learning rate comes after it. It usually is one branch of `sum_of`.

    Args:
        learning_rate: relative change of a block, before `speed`: that of the whole optimizer, such
            as 0.03. :math:`\eta`, 0 or more; a float, a schedule, or what `ParamGroups.per_group`
            returns.
        b1: decay rate of :math:`\mu` for one step: 0 in ScaledAdam, for no momentum. In [0, 1).
        b2: decay rate of :math:`\nu` for one step: 0.98 in icefall. In [0, 1).
        eps: keeps the division finite: 1e-8 in icefall. :math:`\epsilon`, 0 or more; with 0,
            :math:`0/0` counts as 0.
        speed: how fast the scale is learned, relative to the learning rate: 0.05 to 0.1 in icefall.
            :math:`\gamma`, 0 or more.
        period: how many steps are between two changes of the scale: 4 in ScaledAdam, 1 in Cain.
            :math:`T`, 1 or more.
        max_change: bound on the relative change :math:`u / w`. Positive; None for no bound.
        rms_bounds: bounds `(low, high)` on the root mean square of a block, `(1e-5, 3.0)` in
            ScaledAdam; None for an end without a bound.
        at_bounds: `"stop"` changes nothing below `low` and lets no step lead beyond `high`, as
            ScaledAdam does; `"return"` lets a block grow (below `low`) or shrink (above `high`) by
            :math:`T \eta_t \gamma`, whatever its derivative, as LearnedGradient does.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `LearnLogScaleState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import learn_log_scale
        >>> params = jnp.array([3.0, -4.0])
        >>> transform = learn_log_scale(0.1, b2=0.0)
        >>> updates, _ = transform.update(jnp.array([1.0, 0.0]), transform.init(params), params)
        >>> print(updates)  # a larger scale would raise the loss
        [-0.03  0.04]

    References:
        icefall, `egs/librispeech/ASR/zipformer/optim.py`: `ScaledAdam`, the update of the size; in
        July 2022 also `Cain` and `LearnedGradient`.
    """
    rates = as_grouped("learning_rate", learning_rate)
    arguments.check_numbers("[0, 1)", b1=b1, b2=b2)
    arguments.check_numbers("[0, inf)", eps=eps, speed=speed)
    arguments.check_integer("period", period, at_least=1)
    arguments.check_optional_number("max_change", max_change)
    arguments.check_bounds("rms_bounds", rms_bounds)
    arguments.check_choice("at_bounds", at_bounds, ("stop", "return"))
    stacks = check_stacked(stacked)

    def scalars(state: LearnLogScaleState) -> tuple[Any, ...]:
        mu_decay = b1**period
        nu_decay = b2**period
        return (
            (mu_decay, 1 - mu_decay, nu_decay, 1 - nu_decay),
            (period * speed, eps, rms_bounds, max_change),
            rates.at(state.count),
            jnp.sqrt(bias_correction(b2, state.count + 1)),
            state.count % period,
        )

    def choices(leaves: Leaves) -> list[Any]:
        scaled = have_several_elements(leaves, stacks)
        return list(zip(scaled, rates.indices(leaves.tree), strict=True))

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        is_scaled, index = at.choice
        if not is_scaled:
            return jnp.zeros_like(update), at.state
        decays, (speed, eps, rms_bounds, max_change), rates, correction, phase = at.scalars
        mu_decay, mu_weight, nu_decay, nu_weight = decays
        starts = phase == 0
        ends = phase == period - 1
        requests = [engine.block_sums(at.param * update)]
        if rms_bounds is not None:
            requests.append(engine.block_rms(at.param))
        derivative, *rms = yield in_one_round(*requests)
        total = jnp.where(starts, 0, at.state.total) + derivative
        squares = jnp.where(starts, 0, at.state.total_of_squares) + jnp.square(derivative)
        mu = mu_decay * at.state.mu + mu_weight * total / period
        nu = nu_decay * at.state.nu + nu_weight * squares / period
        largest = rates[index] * speed
        change = -largest * correction * quotient(mu, root(nu) + eps)
        if max_change is not None:
            change = jnp.clip(change, -max_change, max_change)
        if rms_bounds is not None:
            change = _within(change, rms[0], rms_bounds, at_bounds == "stop", largest)
        change, total, squares, mu, nu = yield engine.hoist(
            jnp.where(ends, change, 0),
            total,
            squares,
            jnp.where(ends, mu, at.state.mu),
            jnp.where(ends, nu, at.state.nu),
        )
        state = at.state._replace(total=total, total_of_squares=squares, mu=mu, nu=nu)
        return change * at.param, state

    return engine.transformation(
        leaf,
        state=engine.declare(
            LearnLogScaleState,
            count=engine.Counter(),
            total=engine.NumberPerBlock(),
            total_of_squares=engine.NumberPerBlock(),
            mu=engine.NumberPerBlock(),
            nu=engine.NumberPerBlock(),
        ),
        scalars=scalars,
        choices=choices,
        needs_params=True,
        stacked=stacks,
        given="parts",
    )


def _within(
    change: jax.Array,
    rms: jax.Array,
    bounds: Any,
    stops: bool,
    largest: jax.Array,
) -> jax.Array:
    """The change of a block that is outside of its bounds, or would be.

    If it `stops`, there is none below the bounds, and none that leads above them. Otherwise it is
    the largest one back towards them.
    """
    low, high = bounds
    if low is not None:
        change = jnp.where(rms < low, 0 if stops else largest, change)
    if high is None:
        return change
    if stops:
        return jnp.minimum(change, quotient(high - rms, rms))
    return jnp.where(rms > high, -largest, change)
