"""The moments of Adam, and its division by the second alone."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import arguments, engine
from optax_largebatch.arguments import Scalar, without_nu_dtype
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.norms import square
from optax_largebatch.numerics import bias_correction as correction_of
from optax_largebatch.numerics import momentum_weights, positive, quotient, root
from optax_largebatch.params.groups import Grouped, as_grouped
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements

BiasCorrection = Literal["full", "none", "step_size"]


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`."""

    count: jax.Array
    """Steps taken, shape ()."""
    mu: optax.Updates
    """First moments, like the parameters."""
    nu: optax.Updates
    """Second moments, like the parameters."""


class AdamScalars(NamedTuple):
    """The numbers of one step of Adam's moments."""

    b1: Any
    b2: Any
    mu_weight: Any
    """The weight of the gradient in the first moment."""
    nu_weight: Any
    """The weight of the squared gradient in the second moment."""
    eps: Any
    eps_root: Any
    mu_scale: Any
    """The factor of the first moment: its own bias correction, or that of the step size."""
    gradient_scale: Any
    """The factor of the gradient that Nesterov's momentum adds to the first moment."""
    nu_scale: Any
    """The factor of the second moment."""

    def denominator(self, nu: jax.Array) -> jax.Array:
        """`sqrt(v_hat + eps_root) + eps`, or 1 where that is 0: what is divided is 0 there, too."""
        result = root(nu * self.nu_scale + self.eps_root) + self.eps
        cannot_be_zero = any(isinstance(x, float) and x > 0 for x in (self.eps, self.eps_root))
        return result if cannot_be_zero else positive(result)


@without_nu_dtype
def scale_by_adam(
    b1: Scalar | optax.Schedule = 0.9,
    b2: Scalar | optax.Schedule = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    bias_correction: BiasCorrection = "full",
    grad_averaging: bool = True,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides a running mean of the gradient by the root of a running mean of its square.

    .. math::

        m_t &= b_1 m_{t-1} + (1 - b_1) g_t, \qquad v_t = b_2 v_{t-1} + (1 - b_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t) + \bar\epsilon} + \epsilon}

    For complex parameters :math:`g_t^2` is :math:`\lvert g_t \rvert^2`, and :math:`v_t` is real.

    Args:
        b1: decay rate of the first moment, an average over about :math:`1 / (1 - b_1)` steps:
            usually 0.9, at large batches down to 0.6. A number in [0, 1) or a schedule; the
            divisions by :math:`1 - b^t` then take the :math:`b` of the step.
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps:
            0.999, or 0.95 to 0.98 for large batches and short runs. In the same form.
        eps: keeps the division finite where the gradient has been near 0, outside the root: 1e-8 to
            1e-6. :math:`\epsilon`, 0 or more.
        eps_root: the same inside the root: usually 0. :math:`\bar\epsilon`, 0 or more. If both are
            0, the update of a gradient that has been 0 so far is 0.
        bias_correction: what makes up for moments that start at 0: `"full"` as above; `"none"`
            leaves out both divisions by :math:`1 - b^t`; `"step_size"` leaves them out and
            multiplies the result by :math:`\sqrt{1 - b_2^t} / (1 - b_1^t)`, which differs from
            `"full"` in the weight of :math:`\epsilon` only.
        grad_averaging: whether the gradient has the weight :math:`1 - b_1` in :math:`m_t`. False
            gives it the weight 1.
        nesterov: True looks one step ahead: :math:`b_1 m_t / (1 - b_1^{t+1}) + (1 - b_1) g_t /
            (1 - b_1^t)` in place of :math:`m_t / (1 - b_1^t)`.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        A transformation; its state is a `ScaleByAdamState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_adam
        >>> transform = scale_by_adam()
        >>> gradients = jnp.array([0.5, -2.0])
        >>> updates, state = transform.update(gradients, transform.init(jnp.zeros(2)))
        >>> print(updates)
        [ 1. -1.]

    References:
        Kingma and Ba, *Adam: A Method for Stochastic Optimization*, arXiv 1412.6980, Algorithm 1;
        `"step_size"` is the remark at the end of its section 2.
        Dozat, *Incorporating Nesterov Momentum into Adam*, 2016, for `nesterov`.
    """
    arguments.check_decay_rates(b1=b1, b2=b2)
    arguments.check_numbers("[0, inf)", eps=eps, eps_root=eps_root)
    arguments.check_choice("bias_correction", bias_correction, get_args(BiasCorrection))
    arguments.check_flags(grad_averaging=grad_averaging, nesterov=nesterov)
    if nesterov and not (bias_correction == "full" and grad_averaging):
        raise ValueError(
            "nesterov=True needs bias_correction='full' and grad_averaging=True, got "
            f"{bias_correction!r} and {grad_averaging!r}."
        )
    arguments.check_dtypes(mu_dtype=mu_dtype)

    def scalars(state: ScaleByAdamState) -> AdamScalars:
        t = state.count + 1
        b1_now = arguments.decay_rate_at(state.count, "b1", b1)
        b2_now = arguments.decay_rate_at(state.count, "b2", b2)
        bc1 = correction_of(b1_now, t)
        bc2 = correction_of(b2_now, t)
        corrected, gradient_scale = momentum_weights(b1_now, t, nesterov)
        mu_scale, nu_scale = {
            "full": (corrected, 1 / bc2),
            "none": (1.0, 1.0),
            "step_size": (jnp.sqrt(bc2) / bc1, 1.0),
        }[bias_correction]
        return AdamScalars(
            b1_now,
            b2_now,
            mu_weight=1 - b1_now if grad_averaging else 1.0,
            nu_weight=1 - b2_now,
            eps=eps,
            eps_root=eps_root,
            mu_scale=mu_scale,
            gradient_scale=gradient_scale,
            nu_scale=nu_scale,
        )

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        adam: AdamScalars = at.scalars
        mu, nu = yield from advance_moments(update, at, mu_dtype)
        direction = mu * adam.mu_scale
        if nesterov:
            direction = direction + adam.gradient_scale * update
        return direction / adam.denominator(nu), at.state._replace(mu=mu, nu=nu)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByAdamState,
            count=engine.Counter(),
            mu=engine.PerParameter(mu_dtype),
            nu=engine.PerParameter(is_real=True),
        ),
        scalars=scalars,
        given="parts",
        takes_complex=True,
        facts=of_all({"direction": "adam"}),
    )


def advance_moments(
    update: jax.Array,
    at: engine.Leaf,
    mu_dtype: jax.typing.DTypeLike | None,
) -> Any:
    """The part of a leaf program that takes the moments of Adam one step further."""
    adam: AdamScalars = at.scalars
    mu = adam.b1 * at.state.mu + adam.mu_weight * update
    mu = yield engine.materialize(mu, mu_dtype)
    nu = adam.b2 * at.state.nu + adam.nu_weight * square(update)
    nu = yield engine.materialize(nu)
    return mu, nu


def bias_corrected_step_size(
    learning_rate: Grouped,
    b1: Any,
    b2: Any,
) -> Grouped:
    r"""The learning rate :math:`\eta_t \sqrt{1 - b_2^t} / (1 - b_1^t)`, `t` counted from 1."""

    def corrected(rate: Scalar | optax.Schedule) -> optax.Schedule:
        def schedule(count: jax.typing.ArrayLike) -> jax.Array:
            count = jnp.asarray(count)
            value = arguments.number_at(count, "learning_rate", rate)
            bc1 = correction_of(arguments.decay_rate_at(count, "b1", b1), count + 1)
            bc2 = correction_of(arguments.decay_rate_at(count, "b2", b2), count + 1)
            return value * jnp.sqrt(bc2) / bc1

        return schedule

    return as_grouped("learning_rate", learning_rate).map(corrected)


class ScaleBySecondMomentState(NamedTuple):
    """State of `scale_by_second_moment`."""

    count: jax.Array
    """Steps taken, shape ()."""
    nu: optax.Updates
    """Second moments, like the parameters."""


@without_nu_dtype
def scale_by_second_moment(
    b2: Scalar | optax.Schedule = 0.98,
    *,
    eps: Scalar = 1e-8,
    bias_correction: Literal["full", "early", "lagged"] = "full",
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the gradient by the root of a running mean of its square.

    .. math::

        v_t = b_2 v_{t-1} + (1 - b_2) g_t^2, \qquad
        u_t = \frac{g_t}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}

    Args:
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps: 0.98
            in icefall, 0.999 in Adam. A number in [0, 1) or a schedule.
        eps: keeps the division finite where the gradient has been near 0: usually 1e-8.
            :math:`\epsilon`, 0 or more. With 0 an element whose gradient has been 0 so far stays 0.
        bias_correction: `"full"` as above; `"early"` leaves out the division by :math:`1 - b_2^t`
            once this factor is 0.99 or more, as ScaledAdam does; `"lagged"` leaves it out and
            multiplies :math:`u_t` by :math:`1 - b_2^{t-1}` (by its root for blocks of one element),
            as Cain does. This factor is 0 in the first step.
        stacked: the parameters that stack layers, so that each layer counts its own elements:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation; its state is a `ScaleBySecondMomentState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_second_moment
        >>> transform = scale_by_second_moment()
        >>> updates, _ = transform.update(jnp.array([0.5, -2.0]), transform.init(jnp.zeros(2)))
        >>> print(updates)
        [ 1. -1.]

    References:
        icefall, `optim.py`: `ScaledAdam` (`"early"`) and, in July 2022, `Cain` (`"lagged"`).
    """
    arguments.check_decay_rates(b2=b2)
    arguments.check_numbers("[0, inf)", eps=eps)
    arguments.check_choice("bias_correction", bias_correction, ("full", "early", "lagged"))
    stacks = check_stacked(stacked)

    def scalars(state: ScaleBySecondMomentState) -> tuple[Any, ...]:
        decay = arguments.decay_rate_at(state.count, "b2", b2)
        corrected = correction_of(decay, state.count + 1)
        nu_scale = ramp = 1.0
        if bias_correction == "full":
            nu_scale = 1 / corrected
        elif bias_correction == "early":
            nu_scale = jnp.where(corrected < 0.99, 1 / corrected, 1.0)
        else:
            ramp = jnp.where(state.count > 0, correction_of(decay, state.count), 0.0)
        return decay, 1 - decay, eps, nu_scale, ramp

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        decay, weight, eps, nu_scale, ramp = at.scalars
        nu = yield engine.materialize(decay * at.state.nu + weight * jnp.square(update))
        direction = quotient(update, root(nu * nu_scale) + eps)
        factor = ramp if at.choice else root(ramp)
        return factor * direction, at.state._replace(nu=nu)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleBySecondMomentState, count=engine.Counter(), nu=engine.PerParameter()
        ),
        scalars=scalars,
        choices=lambda leaves: have_several_elements(leaves, stacks),
        given="parts",
        facts=of_all({"direction": "adam"}),
    )
