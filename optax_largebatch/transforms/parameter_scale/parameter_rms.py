"""Steps in proportion to the size of the parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_integer, check_numbers
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.numerics import is_due
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements


class ScaleByParameterRmsState(NamedTuple):
    """State of `scale_by_parameter_rms`."""

    count: jax.Array
    """Steps taken, shape ()."""
    rms: jax.Array
    """The root mean square of each block when it was last measured, in the order of
    `jax.tree.leaves`; for a leaf that stacks layers, in the order of its layers. 0 before the first
    step."""


def scale_by_parameter_rms(
    min_rms: Scalar = 1e-5,
    *,
    period: int = 1,
    scalar_scale: Scalar = 1.0,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the update of each block by the root mean square of its parameters.

    .. math:: u \leftarrow \max(\operatorname{rms}(w), \mathrm{min}) \, u,
        \qquad \operatorname{rms}(w) = \sqrt{\operatorname{mean}(w^2)}

    An update with elements of size 1 becomes a relative change of the parameters. The floor lets
    parameters that start at zero move.

    Args:
        min_rms: least root mean square, so that parameters that start at zero move: 1e-5 in
            icefall. Positive.
        period: how many steps are between two measurements of the parameters, 4 in ScaledAdam. They
            are measured in the first step and in the last of every period. 1 or more.
        scalar_scale: the factor for blocks of one element, whose size means nothing: 0.1 in
            ScaledAdam. 0 or more.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ScaleByParameterRmsState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_parameter_rms
        >>> params = {"kernel": jnp.array([3.0, -3.0]), "bias": jnp.zeros(2)}
        >>> transform = scale_by_parameter_rms(min_rms=0.01)
        >>> ones = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
        >>> updates, _ = transform.update(ones, transform.init(params), params)
        >>> print(updates["kernel"], updates["bias"])
        [3. 3.] [0.01 0.01]

    References:
        icefall, `egs/librispeech/ASR/zipformer/optim.py`: `ScaledAdam`.
    """
    check_numbers("(0, inf)", min_rms=min_rms)
    check_numbers("[0, inf)", scalar_scale=scalar_scale)
    check_integer("period", period, at_least=1)
    stacks = check_stacked(stacked)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        least, scalar_scale, is_measured = at.scalars
        if not at.choice:
            return scalar_scale * update, at.state
        (rms,) = yield engine.block_rms(at.param)
        rms = jnp.where(is_measured, rms, at.state.rms)
        rms, factor = yield engine.hoist(rms, jnp.maximum(rms, least))
        return factor * update, at.state._replace(rms=rms)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByParameterRmsState, count=engine.Counter(), rms=engine.NumberPerBlock()
        ),
        scalars=lambda state: (min_rms, scalar_scale, is_due(state.count, period)),
        choices=lambda leaves: have_several_elements(leaves, stacks),
        needs_params=True,
        stacked=stacks,
        given="parts",
        facts=of_all({"length": "size"}),
    )
