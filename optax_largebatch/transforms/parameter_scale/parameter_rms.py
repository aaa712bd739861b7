"""Steps in proportion to the size of the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import (
    Bounds,
    Scalar,
    check_integer,
    check_number,
    check_optional_number,
    check_order,
)
from optax_largebatch.engine.blocks import NumberPerBlock
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.engine.requests import Leaf, LeafProgram, block_rms, hoist
from optax_largebatch.engine.state import Counter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.numerics import clip, is_due
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements


class ScaleByParameterRmsState(NamedTuple):
    """State of `scale_by_parameter_rms`."""

    count: jax.Array
    """Steps taken, shape ()."""
    rms: jax.Array
    """The root mean square of each block when it was last measured, in the order of
    `jax.tree.leaves`; for a leaf that stacks layers, in the order of its layers. 0 before the first
    step."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    bounds: Bounds
    scalar_scale: Any
    looks: jax.Array
    """Whether the parameters are measured in this step."""


def scale_by_parameter_rms(
    min_rms: Scalar = 1e-5,
    *,
    max_rms: Scalar | None = None,
    period: int = 1,
    scalar_scale: Scalar = 1.0,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the update of each block by the root mean square of its parameters.

    .. math:: u \leftarrow \min(\max(\operatorname{rms}(w), \mathrm{min}), \mathrm{max}) \, u,
        \qquad \operatorname{rms}(w) = \sqrt{\operatorname{mean}(w^2)}

    An update with elements of size 1 becomes a relative change of the parameters. The floor lets
    parameters that start at zero move.

    Args:
        min_rms: least root mean square, so that parameters that start at zero move: 1e-5 in
            icefall. Positive.
        max_rms: largest root mean square: 3 in ScaledAdam. Positive; None for no ceiling.
        period: how many steps are between two measurements of the parameters, 4 in ScaledAdam. They
            are measured in the first step and in the last of every period. 1 or more.
        scalar_scale: the factor for blocks of one element, whose size means nothing: 0.1 in
            ScaledAdam. 0 or more.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ScaleByParameterRmsState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

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
    check_number("min_rms", min_rms, "(0, inf)")
    check_optional_number("max_rms", max_rms, "(0, inf)")
    if max_rms is not None:
        check_order("min_rms", min_rms, "max_rms", max_rms)
    check_number("scalar_scale", scalar_scale, "[0, inf)")
    check_integer("period", period, at_least=1)
    stacks = check_stacked(stacked)

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        step: _Scalars = at.scalars
        if not at.choice:
            return step.scalar_scale * update, at.state
        (rms,) = yield block_rms(at.param)
        rms = jnp.where(step.looks, rms, at.state.rms)
        rms, factor = yield hoist(rms, clip(rms, step.bounds))
        return factor * update, at.state._replace(rms=rms)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(ScaleByParameterRmsState, count=Counter(), rms=NumberPerBlock()),
            scalars=lambda state: _Scalars(
                (min_rms, max_rms), scalar_scale, is_due(state.count, period)
            ),
            choices=lambda leaves: have_several_elements(leaves, stacks),
            needs_params=True,
            stacked=stacks,
            given="parts",
            facts=of_all({"length": "size"}),
        )
    )
