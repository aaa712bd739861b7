"""Division by the root of the second moment: Adam without momentum."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_choice, check_dtype, check_number
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.engine.requests import Leaf, LeafProgram, materialize
from optax_largebatch.engine.state import Counter, PerParameter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.numerics import bias_correction as correction_of
from optax_largebatch.numerics import quotient, root
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.stacked import Stacks, check_stacked


class ScaleBySecondMomentState(NamedTuple):
    """State of `scale_by_second_moment`."""

    count: jax.Array
    """Steps taken, shape ()."""
    nu: optax.Updates
    """Second moments, like the parameters."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    decay: Any
    weight: Any
    eps: Any
    nu_scale: Any
    ramp: Any
    ramp_of_one: Any
    """The ramp of blocks of one element."""


def scale_by_second_moment(
    b2: Scalar = 0.98,
    *,
    eps: Scalar = 1e-8,
    bias_correction: Literal["full", "early", "lagged"] = "full",
    stacked: Stacks = None,
    nu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the gradient by the root of a running mean of its square.

    .. math::

        v_t = b_2 v_{t-1} + (1 - b_2) g_t^2, \qquad
        u_t = \frac{g_t}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}

    Args:
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps: 0.98
            in icefall, 0.999 in Adam. In [0, 1).
        eps: keeps the division finite where the gradient has been near 0: usually 1e-8.
            :math:`\epsilon`, 0 or more. With 0 an element whose gradient has been 0 so far stays 0.
        bias_correction: `"full"` as above; `"early"` leaves out the division by :math:`1 - b_2^t`
            once this factor is 0.99 or more, as ScaledAdam does; `"lagged"` leaves it out and
            multiplies :math:`u_t` by :math:`1 - b_2^{t-1}` (by its root for blocks of one element),
            as Cain does. This factor is 0 in the first step.
        stacked: the parameters that stack layers, so that each layer counts its own elements:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.
        nu_dtype: dtype in which the second moment is kept. In bfloat16 it stops growing early, so
            leave it at None, which is float32 (float64 for float64 parameters).

    Returns:
        A transformation; its state is a `ScaleBySecondMomentState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

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
    check_number("b2", b2, "[0, 1)")
    check_number("eps", eps, "[0, inf)")
    check_choice("bias_correction", bias_correction, ("full", "early", "lagged"))
    check_dtype("nu_dtype", nu_dtype)
    stacks = check_stacked(stacked)

    def scalars(state: ScaleBySecondMomentState) -> _Scalars:
        corrected = correction_of(b2, state.count + 1)
        nu_scale = ramp = ramp_of_one = 1.0
        if bias_correction == "full":
            nu_scale = 1 / corrected
        elif bias_correction == "early":
            nu_scale = jnp.where(corrected < 0.99, 1 / corrected, 1.0)
        else:
            ramp = jnp.where(state.count > 0, correction_of(b2, state.count), 0.0)
            ramp_of_one = jnp.sqrt(ramp)
        return _Scalars(b2, 1 - b2, eps, nu_scale, ramp, ramp_of_one)

    def choices(leaves: Leaves) -> list[bool]:
        """Whether the blocks have one element each."""
        axes = enumerate(stacks.axes(leaves.tree))
        return [leaves.one_element(index, own) for index, own in axes]

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        step: _Scalars = at.scalars
        nu = step.decay * at.state.nu + step.weight * jnp.square(update)
        nu = yield materialize(nu, nu_dtype)
        ramp = step.ramp_of_one if at.choice else step.ramp
        direction = quotient(update, root(nu * step.nu_scale) + step.eps)
        return ramp * direction, at.state._replace(nu=nu)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(ScaleBySecondMomentState, count=Counter(), nu=PerParameter(nu_dtype)),
            scalars=scalars,
            choices=choices,
            given="parts",
            facts=of_all({"direction": "adam"}),
        )
    )
