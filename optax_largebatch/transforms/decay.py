"""Weight decay: decoupled, and above a target size as in Eve."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_flags, check_number, is_zero, renamed
from optax_largebatch.engine.recorded_states import Facts
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.stacked import Stacked, Stacks, check_stacked, have_several_elements


class AddDecayedWeightsState(NamedTuple):
    """State of `add_decayed_weights`."""

    count: jax.Array
    """Steps taken, shape ()."""


class DecayToTargetRmsState(NamedTuple):
    """State of `decay_to_target_rms`."""

    count: jax.Array
    """Steps taken, shape ()."""


@renamed("mask", "weight_decay_mask")
def add_decayed_weights(
    weight_decay: Hyperparameter = 0.0,
    weight_decay_mask: Mask = None,
    *,
    cautious: bool = False,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds a multiple of the parameters to the update.

    .. math:: u \leftarrow u + \lambda_t w

    Args:
        weight_decay: how much of the parameters is added to the update. Before a trust ratio 0.01
            is typical (see `lamb`); after it, it is multiplied by the learning rate as AdamW's.
            :math:`\lambda`, 0 or more; a float, a schedule, or what `ParamGroups.per_group`
            returns.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`.
        cautious: True decays a weight only where that takes it the way of its step,
            :math:`u w \ge 0`, as nanochat and Dion's `cautious_wd`.
        stacked: the parameters that stack layers: patterns with their axes, `{"layers/": 0}`, or
            the result of `stacked_layers`. The mask sees the shape of one layer, so that
            `at_least_ndim(2)` leaves out a stack of biases. None if there are none.

    Returns:
        A transformation that needs parameters; its state is an `AddDecayedWeightsState` whether
        the decay is scheduled or not.

    Raises:
        ValueError: the decay is negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import add_decayed_weights, matching_kinds
        >>> params = {"kernel": jnp.array([2.0]), "bias": jnp.array([2.0])}
        >>> transform = add_decayed_weights(0.1, ~matching_kinds("bias", "norm"))
        >>> updates, _ = transform.update(
        ...     {"kernel": jnp.zeros(1), "bias": jnp.zeros(1)}, transform.init(params), params)
        >>> print(updates["kernel"], updates["bias"])
        [0.2] [0.]

    References:
        Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, arXiv 1711.05101.
        Chen et al., *Cautious Weight Decay*, arXiv 2510.12402, for `cautious`.
    """
    check_flags(cautious=cautious)
    decay = WeightDecay(weight_decay, weight_decay_mask, check_stacked(stacked))

    def leaf(update: jax.Array, at: engine.Leaf) -> tuple[jax.Array, Any]:
        param = at.param
        if cautious:
            param = jnp.where(update * param >= 0, param, 0)
        decayed = update if at.choice is None else update + at.scalars[at.choice] * param
        return decayed, at.state

    return engine.transformation(
        leaf,
        state=engine.declare(AddDecayedWeightsState, count=engine.Counter()),
        scalars=lambda state: decay.values.at(state.count),
        choices=lambda leaves: decay.choices(leaves.tree),
        needs_params=True,
        given="parts",
        takes_complex=not cautious,
        facts=decay.facts,
    )


@renamed("mask", "weight_decay_mask")
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
        indices = decay.choices(leaves.tree)
        large = have_several_elements(leaves, stacks)
        return [index if flag else None for index, flag in zip(indices, large, strict=True)]

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        if at.choice is None:
            return update, at.state
        decays, target = at.scalars
        (rms,) = yield engine.block_rms(at.start)
        (share,) = yield engine.hoist(jnp.where(rms > target, decays[at.choice], 0))
        return update - share * at.param, at.state

    return engine.transformation(
        leaf,
        state=engine.declare(DecayToTargetRmsState, count=engine.Counter()),
        scalars=lambda state: (decay.values.at(state.count), target_rms),
        choices=choices,
        needs_params=True,
        stacked=stacks,
        given="parts",
        takes_complex=True,
        facts=decay.facts,
    )


class WeightDecay:
    """Decay by group and mask; a leaf's choice is the index of its value, None for no decay."""

    def __init__(
        self,
        weight_decay: Hyperparameter,
        mask: Mask,
        stacked: Stacked,
        allowed: str = "[0, inf)",
    ):
        check_mask("weight_decay_mask", mask)
        self.values = as_grouped("weight_decay", weight_decay, allowed)
        self.mask = mask
        self.stacked = stacked

    def choices(self, params: optax.Params) -> list[int | None]:
        """For each leaf the index of its decay, or None where that is known to be zero."""
        decayed = select_leaves("weight_decay_mask", self.mask, self.stacked.blocks(params))
        indices = self.values.indices(params)
        return [
            None if not flag or is_zero(self.values.values[index]) else index
            for flag, index in zip(decayed, indices, strict=True)
        ]

    def facts(self, params: optax.Params) -> list[Facts]:
        """What readers of a run want to know of the decay of each leaf."""
        values = self.values.values
        return [{} if i is None else {"decay": values[i]} for i in self.choices(params)]
