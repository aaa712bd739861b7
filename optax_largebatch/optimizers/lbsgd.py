"""LBSGD: large-batch SGD with warm-up strategies and macro-batches."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import arguments, engine
from optax_largebatch.arguments import Scalar, refused, renamed
from optax_largebatch.params.groups import Grouped, ParamGroups, check_groups
from optax_largebatch.params.masks import Mask, check_mask
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.schedules.warmup import as_float, large_batch_warmup
from optax_largebatch.transforms.chain import chain, leaf_transform
from optax_largebatch.transforms.learning_rate import (
    ScaleByLearningRateState,
    scale_by_learning_rate,
)
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.transforms.trust_ratio import scale_by_lars
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState, accumulate_gradients


@refused(
    "begin_epoch", why="To go on with a run, restore its state, which counts the micro-batches."
)
@refused(
    "clip_gradient",
    why="Write lb.accumulate_gradients(lb.chain(lb.clip_by_value(...), ...), every=batch_scale), "
    "as in the last row of LBSGD in docs/dialects.md.",
)
@renamed("mask", "weight_decay_mask")
def lbsgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: Scalar = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    batch_scale: int = 1,
    warmup_strategy: Literal["linear", "power2", "sqrt", "lars"] = "linear",
    warmup_epochs: Scalar = 5,
    updates_per_epoch: Scalar = 32,
    trust_ratio_mask: Mask = None,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LBSGD: SGD with gradient accumulation and a learning rate that warms up to the large batch.

    Gradients are averaged over a macro-batch of :math:`S` micro-batches; then

    .. math::

        b \leftarrow \mu b + \eta M (g + \lambda w), \qquad w \leftarrow w - b

    For the strategies `linear`, `power2` and `sqrt` :math:`M` grows from 1 to :math:`S` during the
    warm-up (see `large_batch_warmup`). For `lars` there is no warm-up. Each block (an array, or one
    layer of an array that stacks layers) has its own

    .. math::

        M = \operatorname{clip}\left(\sqrt{\frac{\lVert w \rVert^2}
            {\lVert g \rVert^2 + \lambda \lVert w \rVert^2 + 10^{-18}}},\ 0.01,\ 100\right).

    Between two steps the updates are exact zeros, and only the sum of the gradients and the counts
    change.

    Args:
        learning_rate: the rate that suits one micro-batch, such as 0.1 for 256 images in SGD;
            :math:`M` scales it to the macro-batch. :math:`\eta`, 0 or more; a float, or a schedule
            of macro-batches.
        momentum: share of the buffer that stays in each step: usually 0.9; 0 is MXNet's default.
            :math:`\mu`, in [0, 1).
        weight_decay: how much of the parameters is added to the gradient: 1e-4 is usual for images.
            :math:`\lambda`, 0 or more; a float or a schedule.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`.
        batch_scale: how many micro-batches are a macro-batch, and one step. :math:`S`, 1 or more.
        warmup_strategy: how :math:`M` grows from 1 to :math:`S`: `"linear"`, slower at first
            (`"power2"`) or faster at first (`"sqrt"`); `"lars"` has a ratio for each layer in place
            of it.
        warmup_epochs: length of the warm-up in epochs, 0 or more: 5 in MXNet.
        updates_per_epoch: micro-batches in an epoch, examples over micro-batch size: 5005 for
            ImageNet in batches of 256. Positive.
        trust_ratio_mask: the parameters that `warmup_strategy="lars"` adapts; None for all. Usually
            all but biases and the scales of norms.
        groups: groups of parameters with another learning rate or decay, from
            `param_groups`; None for one group.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        accumulator_dtype: dtype in which the sum of gradients and :math:`b` are kept; None for
            float32 (float64 for float64 parameters).

    Returns:
        The optimizer, to be called once for every micro-batch. Its `update` needs the parameters;
        its state is an `AccumulateGradientsState`. `update` takes the extra arguments `examples`
        and `flush` of `accumulate_gradients`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import lbsgd
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = lbsgd(0.05, batch_scale=2, warmup_epochs=1, updates_per_epoch=10)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 29.8
        loss 9.0
        loss 3.7
        loss 1.0

    References:
        MXNet `LBSGD` (pull request 8918; in MXNet up to 1.9.1).
    """
    groups = check_groups(groups, stacked)
    arguments.check_integer("batch_scale", batch_scale, at_least=1)
    arguments.check_choice("warmup_strategy", warmup_strategy, ("linear", "power2", "sqrt", "lars"))
    arguments.check_numbers("[0, inf)", warmup_epochs=warmup_epochs)
    arguments.check_numbers("(0, inf)", updates_per_epoch=updates_per_epoch)
    check_mask("trust_ratio_mask", trust_ratio_mask)
    adapts = warmup_strategy == "lars"
    # Where the trust ratio sets the size of a step, the rate does not grow: a scale of 1.
    multiplier = large_batch_warmup(
        1.0,
        batch_scale=1 if adapts else batch_scale,
        warmup_steps=warmup_epochs * updates_per_epoch,
        strategy="linear" if adapts else warmup_strategy,
    )
    return count_micro_batches(
        accumulate_gradients(
            chain(
                scale_by_lars(
                    groups.per_group("weight_decay", weight_decay),
                    weight_decay_mask=weight_decay_mask,
                    trust_coefficient=1.0,
                    eps=1e-18,
                    trust_ratio_mask=trust_ratio_mask if adapts else lambda params: False,
                    denominator="squares",
                    trust_ratio_bounds=(0.01, 100.0),
                    zero_ratio="formula",
                    stacked=stacked,
                ),
                scale_by_warmed_up_rate(
                    groups.per_group("learning_rate", learning_rate), multiplier
                ),
                accumulate_momentum(momentum, accumulator_dtype=accumulator_dtype),
            ),
            every=batch_scale,
            accumulator_dtype=accumulator_dtype,
        )
    )


class ScaleByWarmedUpRateState(NamedTuple):
    """State of the learning rate of `lbsgd`."""

    rate: ScaleByLearningRateState
    """The macro-batches so far, and the rates of the last step."""
    micro_batches: jax.Array
    """Micro-batches so far, shape (). The warm-up counts these, because `flush` makes macro-batches
    that are smaller than usual."""


def scale_by_warmed_up_rate(
    learning_rate: Grouped,
    multiplier: optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_learning_rate`, times a schedule of the micro-batches.

    Args:
        learning_rate: the rate; a schedule counts steps.
        multiplier: the schedule of the micro-batches, which `count_micro_batches` counts.
    """
    plain = leaf_transform(scale_by_learning_rate(learning_rate))

    def scalars(state: ScaleByWarmedUpRateState) -> tuple[Any, ...]:
        warmed_up = multiplier(as_float(state.micro_batches))
        return tuple(rate * warmed_up for rate in learning_rate.at(state.rate.count))

    def leaf(update: jax.Array, at: engine.Leaf) -> tuple[jax.Array, Any]:
        rate = at.scalars[at.choice]
        rates_of_step = at.state.rate._replace(learning_rates=rate)
        return -rate * update, at.state._replace(rate=rates_of_step)

    return engine.transformation(
        dataclasses.replace(
            plain,
            leaf=leaf,
            state=engine.declare(
                ScaleByWarmedUpRateState,
                rate=engine.StateOf(plain),
                micro_batches=engine.Shared(lambda params: jnp.zeros([], jnp.int32)),
            ),
            scalars=scalars,
            name="scale_by_warmed_up_rate",
        )
    )


def count_micro_batches(
    accumulated: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Counts micro-batches in the state of the chain that `accumulate_gradients` wraps."""

    def counted(link: Any) -> Any:
        if not isinstance(link, ScaleByWarmedUpRateState):
            return link
        return link._replace(micro_batches=optax.safe_increment(link.micro_batches))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        arguments.check_state("lbsgd", AccumulateGradientsState, state)
        state = state._replace(inner_state=tuple(map(counted, state.inner_state)))
        return accumulated.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(accumulated.init, update)
