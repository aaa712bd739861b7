"""Weight decay of blocks whose weights are large, as in Eve."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import (
    Scalar,
    check_number,
    renamed,
)
from optax_largebatch.engine.requests import Leaf, LeafProgram, block_rms, hoist
from optax_largebatch.engine.state import Counter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.groups import Hyperparameter
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements
from optax_largebatch.transforms.decay import WeightDecay


class DecayToTargetRmsState(NamedTuple):
    """State of `decay_to_target_rms`."""

    count: jax.Array
    """Steps taken, shape ()."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    decays: tuple[Any, ...]
    target: Any


@renamed(mask="weight_decay_mask")
def decay_to_target_rms(
    weight_decay: Hyperparameter = 1e-3,
    *,
    target_rms: Scalar = 0.1,
    weight_decay_mask: Mask = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shrinks the blocks whose root mean square exceeds a target.

    .. math::

        u \leftarrow u - \lambda_t w \quad\text{where}\quad
        \operatorname{rms}(w) = \sqrt{\operatorname{mean}(w^2)} > \rho

    Put it after the learning rate in a chain, so that the decay is not multiplied by the rate.
    Blocks of one element are left alone.

    Args:
        weight_decay: the fraction of the weights that a step takes away: 1e-3 in Eve.
            :math:`\lambda`, in [0, 0.1]; a float, a schedule, or what `ParamGroups.per_group`
            returns.
        target_rms: root mean square above which blocks are decayed: 0.1 in Eve. :math:`\rho`, in
            (0, 10].
        weight_decay_mask: the parameters that may be decayed; None for all, which is usual, since
            only large ones are.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `DecayToTargetRmsState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import decay_to_target_rms
        >>> params = {"large": jnp.array([3.0, 4.0]), "small": jnp.array([0.03, 0.04])}
        >>> zeros = {"large": jnp.zeros(2), "small": jnp.zeros(2)}
        >>> transform = decay_to_target_rms(0.1)
        >>> updates, _ = transform.update(zeros, transform.init(params), params)
        >>> print(updates["large"], updates["small"])
        [-0.3 -0.4] [0. 0.]

    References:
        icefall, `optim.py` of July 2022: `Eve`.
    """
    check_number("target_rms", target_rms, "(0, 10]")
    stacks = check_stacked(stacked)
    decay = WeightDecay(weight_decay, weight_decay_mask, stacks, "[0, 0.1]")

    def choices(leaves: Leaves) -> list[Any]:
        """The decay's index of each leaf, None for one that passes."""
        columns = zip(
            decay.choices(leaves.tree), have_several_elements(leaves, stacks), strict=True
        )
        return [own if decayed else None for own, decayed in columns]

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        if at.choice is None:
            return update, at.state
        step: _Scalars = at.scalars
        (rms,) = yield block_rms(at.start)
        too_large = rms > step.target
        (own,) = yield hoist(jnp.where(too_large, step.decays[at.choice], 0))
        return update - own * at.param, at.state

    return transformation(
        LeafTransform(
            leaf,
            state=declare(DecayToTargetRmsState, count=Counter()),
            scalars=lambda state: _Scalars(decay.values.at(state.count), target_rms),
            choices=choices,
            needs_params=True,
            stacked=stacks,
            given="parts",
            facts=decay.facts,
        )
    )
