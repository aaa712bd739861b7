"""Gradient accumulation: many micro-batches for one step."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_largebatch import arguments
from optax_largebatch.norms import check_same_everywhere, dtype_like
from optax_largebatch.numerics import zeros_like
from optax_largebatch.params.leaves import Leaves, gradients_of, leaves_of
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.stacked import Stacks, check_stacked
from optax_largebatch.transforms.noise.small_batches import (
    Gradients,
    SmallBatches,
    block_square_norms,
)
from optax_largebatch.wrappers.bad_steps import SkipBadStepsState
from optax_largebatch.wrappers.inner import check_inner, switch
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState


class AccumulateGradientsState(NamedTuple):
    """State of `accumulate_gradients`."""

    micro_step: jax.Array
    """The number of micro-batches in the accumulator, shape ()."""
    macro_step: jax.Array
    """The number of steps of the inner transformation, shape ()."""
    examples: jax.Array
    """The number of examples in the accumulator, shape (); of micro-batches, if `update` is not
    given `examples`."""
    accumulator: optax.Updates
    """Sum of the gradients since the last step, like the parameters; without meaning where
    `examples` is 0."""
    small_batches: SmallBatches
    """The norms of these gradients; zeros, unless `small_batches` passes them to `inner`."""
    inner_state: optax.OptState
    """State of the inner transformation."""

    @property
    def mini_step(self) -> jax.Array:
        """`micro_step`, by its name in `optax.MultiStepsState`."""
        return self.micro_step

    @property
    def gradient_step(self) -> jax.Array:
        """`macro_step`, by its name in `optax.MultiStepsState`."""
        return self.macro_step


_ACCUMULATING = (AccumulateGradientsState, optax.MultiStepsState)
"""States that count micro-batches, and take a step after several."""

_SAY_IF_MOVED = (*_ACCUMULATING, SkipBadStepsState, DynamicLossScaleState)
"""States that know whether the last call moved the parameters."""


@arguments.renamed("opt", "inner")
@arguments.renamed("every_k_schedule", "every")
@arguments.refused(
    "use_grad_mean",
    why="A step is always that of the mean gradient. For that of the sum, put "
    "optax.scale(every) first in `inner`.",
)
@arguments.refused(
    "should_skip_update_fn",
    why="To leave out bad steps, put a wrapper around this one: "
    "skip_bad_steps(accumulate_gradients(...)).",
)
def accumulate_gradients(
    inner: optax.GradientTransformation,
    *,
    every: int | Callable[[ArrayLike], ArrayLike],
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    small_batches: bool | int = False,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient accumulation: one step of `inner` for each macro-batch, with its mean gradient.

    .. math:: g = \sum_i n_i g_i \Big/ \sum_i n_i

    A macro-batch is the batch of one step; it is given in parts, the micro-batches. Between two
    steps the updates are exact zeros and `inner` is not computed at all. The schedules of `inner`
    count macro-batches.

    `update` takes two extra arguments, which may be traced and must be the same on all devices:

    - `examples`: the number :math:`n_i` of examples in the micro-batch, for micro-batches that
      differ in size; it may be a fraction. None for 1 each. A micro-batch of 0 examples adds
      nothing, even if its gradient is a NaN.
    - `flush`: True takes the step now, with the micro-batches so far, as at the end of an epoch.

    There is no step before the first example. Every parameter needs a gradient in every
    micro-batch: hide frozen ones by `optax.partition` or `optax.masked`, or give zeros.

    It can replace `optax.MultiSteps`: its state has `mini_step` and `gradient_step` too, and
    `has_updated(state)` says whether the last micro-batch completed a step.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        every: how many micro-batches make a macro-batch, which is one step: batch size over what
            the devices hold at once (`batch_scale` counts it). 1 or more; an integer, or a schedule
            of the macro-batches so far, rounded up to an integer. `init` tries the schedule at 0
            and at the powers of 2.
        accumulator_dtype: dtype in which the sum is kept; None for float32 (float64 for float64
            parameters), which loses no small gradients.
        small_batches: passes the squared norms of the micro-batches' gradients and of their mean to
            `inner`, as the extra argument `small_batches` that `measure_noise_scale` needs. True
            measures every macro-batch; an integer measures one in so many, which is cheaper. In a
            measured macro-batch, each gradient is read once more. The unit of the noise scale is an
            example if `update` is given `examples`, and otherwise a micro-batch.
        stacked: the same as for the `measure_noise_scale` in `inner`.

    Returns:
        A transformation; its state is an `AccumulateGradientsState`.

    Raises:
        ValueError: `every` is less than 1, or is 1 with `small_batches`; the schedule `every`
            returns a number less than 1 or a NaN (raised by `init` and by steps that are not
            compiled); or, from `update`, a gradient is None.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import accumulate_gradients
        >>> optimizer = accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.zeros(1)
        >>> state = optimizer.init(params)
        >>> for gradient in (1.0, 3.0):
        ...     updates, state = optimizer.update(jnp.array([gradient]), state, params)
        ...     print(updates)
        [0.]
        [-2.]
        >>> for gradient, examples in ((1.0, 32), (4.0, 16)):
        ...     updates, state = optimizer.update(
        ...         jnp.array([gradient]), state, params, examples=examples
        ...     )
        >>> print(updates)
        [-2.]
    """
    inner = check_inner(inner)
    if not callable(every):
        arguments.check_integer("every", every, at_least=1)
    arguments.check_dtypes(accumulator_dtype=accumulator_dtype)
    if not isinstance(small_batches, bool):
        arguments.check_integer("small_batches", small_batches, at_least=1)
    if small_batches and every == 1:
        raise ValueError(
            f"every must be 2 or more with small_batches={small_batches}, got 1: a single "
            "micro-batch says nothing about the noise."
        )
    stacks = check_stacked(stacked, segments=False)

    def init(params: optax.Params) -> AccumulateGradientsState:
        leaves_of("params", params)
        _check_schedule(every)
        counters = [jnp.zeros([], dtype) for dtype in ("int32", "int32", "float32")]
        norms = SmallBatches.none(sum(stacks.sizes(params)))
        counters, norms = replicated((counters, norms), params)
        sums = zeros_like(params, accumulator_dtype)
        return AccumulateGradientsState(
            *counters, accumulator=sums, small_batches=norms, inner_state=inner.init(params)
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        examples: Any = None,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        arguments.check_state("accumulate_gradients", AccumulateGradientsState, state)
        leaves, gradients = gradients_of(updates, params, extra_args.get("partition_specs"))
        _check_all_given(leaves, gradients)
        _check_extra_args(examples, flush)
        if every != 1 and extra_args.get("small_batches") is not None:
            raise ValueError(
                "small_batches must not be given to the `update` of accumulate_gradients, because "
                "its step has several micro-batches. Build it with small_batches=True instead: it "
                "passes their norms to the inner transformation."
            )

        def inner_step(means: list[Any]) -> tuple[list[Any], optax.OptState]:
            """The updates in the parameters' dtypes, and the new state of `inner`."""
            mean = leaves.rebuild(means)
            new, inner_state = inner.update(mean, state.inner_state, params, **extra_args)
            return leaves.updates(new), inner_state

        next_step = jnp.asarray(optax.safe_increment(state.macro_step))
        if every == 1 and examples is None:  # the gradient is its own mean, and nothing is summed
            new, inner_state = inner_step(gradients)
            return leaves.rebuild(new), state._replace(
                macro_step=next_step, inner_state=inner_state
            )

        weight = jnp.asarray(1 if examples is None else examples, state.examples.dtype)
        total = state.examples + weight
        wanted = _micro_batches(every, state.macro_step)
        complete = ((state.micro_step + 1 >= wanted) | flush) & (total > 0)
        sums = []
        before = leaves.alike("the state's accumulator", state.accumulator)
        for gradient, old in zip(gradients, before, strict=True):
            part = gradient.astype(old.dtype)
            if examples is not None:
                part = jnp.where(weight > 0, weight.astype(part.dtype) * part, 0)
            sums.append(jnp.where(state.examples > 0, old, 0) + part)

        small = state.small_batches
        if small_batches:
            measured = state.macro_step % int(small_batches) == 0  # True is each
            square_norms = functools.partial(block_square_norms, leaves, stacks)
            (of_batch,) = square_norms(measured, Gradients(gradients))
            # Taken here from the sum, which lies in memory anyway: a step may overwrite it.
            (of_sum,) = square_norms(measured & complete, Gradients(sums))
            small = small.with_part(of_batch, jnp.where(measured, weight, 0))
            of_mean = of_sum / jnp.square(jnp.where(complete, total, 1))
            extra_args["small_batches"] = small._replace(square_norms_of_mean=of_mean)

        new, sums, inner_state = _step_or_wait(
            leaves,
            sums,
            total,
            complete,
            inner_step,
            state.inner_state,
            keep_sums=bool(small_batches),
        )
        return leaves.rebuild(new), AccumulateGradientsState(
            micro_step=jnp.where(complete, 0, state.micro_step + 1),
            macro_step=jnp.where(complete, next_step, state.macro_step),
            examples=jnp.where(complete, 0, total),
            accumulator=leaves.rebuild(sums),
            small_batches=jax.tree.map(lambda x: jnp.where(complete, 0, x), small),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _step_or_wait(
    leaves: Leaves,
    sums: list[Any],
    examples: jax.Array,
    complete: jax.Array,
    inner_step: Callable[[list[Any]], Any],
    inner_state: Any,
    keep_sums: bool,
) -> tuple[list[Any], list[Any], optax.OptState]:
    """Takes a step with the means if the macro-batch is complete.

    A micro-batch without a step need not move more than the sum. So the updates of a step take the
    memory of the sum, which is no longer needed then.

    Args:
        leaves: the parameters.
        sums: the sums of their gradients so far.
        examples: how many are in the sums.
        complete: whether the macro-batch is complete.
        inner_step: a step with the means.
        inner_state: the state of `inner`.
        keep_sums: whether the sums have another reader.

    Returns:
        The updates, the sums for the next micro-batch and the new state of `inner`.
    """

    def is_mean(total: jax.Array) -> bool:
        """Whether the last sum is written as the mean: a wide one, if it has no other reader."""
        return not keep_sums and total.dtype == dtype_like(total.dtype)

    sums = [x / jnp.where(complete, examples, 1).astype(x.dtype) if is_mean(x) else x for x in sums]

    def dtype_of_result(total: jax.Array, param: jax.Array) -> jnp.dtype:
        """The wider dtype of both; that of the parameter if they are as wide."""
        return max(param.dtype, total.dtype, key=lambda dtype: jnp.finfo(dtype).bits)

    dtypes = leaves.map(dtype_of_result, sums)

    def cast(arrays: list[Any]) -> list[Any]:
        return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    def mean(total: jax.Array) -> jax.Array:
        if is_mean(total):
            return total
        dtype = dtype_like(total.dtype)
        return total.astype(dtype) / examples.astype(dtype)

    def step() -> tuple[list[Any], optax.OptState]:
        new, new_state = inner_step(list(map(mean, sums)))
        return cast(new), new_state

    results, new_state = switch(complete, step, lambda: (cast(sums), inner_state))
    updates = leaves.map(
        lambda x, param: jnp.where(complete, x, 0).astype(param.dtype),
        results,
    )
    sums = [new if new.dtype == old.dtype else old for new, old in zip(results, sums, strict=True)]
    return updates, sums, new_state


def has_updated(state: optax.OptState) -> jax.Array:
    r"""Whether the last micro-batch completed a macro-batch and the parameters moved.

    They do not move if `skip_bad_steps` or `dynamic_loss_scale` leaves the micro-batch or the step
    out.

    Args:
        state: the state of `accumulate_gradients`, also inside other wrappers, or of
            `optax.MultiSteps`, which has a method of this name.

    Returns:
        A boolean, shape (); False before the first step.

    Raises:
        ValueError: `state` holds no such state, or more than one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import accumulate_gradients, has_updated
        >>> optimizer = accumulate_gradients(optax.sgd(1.0), every=2)
        >>> state = optimizer.init(jnp.zeros(1))
        >>> for _ in range(3):
        ...     updates, state = optimizer.update(jnp.ones(1), state)
        ...     print(has_updated(state), state.gradient_step)
        False 0
        True 1
        False 1
    """
    if (number := len(_inside(state, _ACCUMULATING))) != 1:
        raise ValueError(
            f"state must hold one state of accumulate_gradients, got {number} of them in a "
            f"{type(state).__name__}. Pass the state of the optimizer as `update` returned it."
        )
    return has_moved(state)


def has_moved(state: optax.OptState) -> jax.Array:
    """Whether the last call moved the parameters, as far as the wrappers in a state say.

    Of wrappers side by side, as behind `optax.partition`, those that accumulate count alone, if
    there are any. It is enough if one of them has moved its parameters.
    """
    wrappers = _inside(state, _SAY_IF_MOVED)
    wrappers = [node for node in wrappers if _inside(node, _ACCUMULATING)] or wrappers
    if not wrappers:
        return jnp.ones([], bool)
    return functools.reduce(jnp.logical_or, map(_has_moved_inside, wrappers))


def _has_moved_inside(wrapper: Any) -> jax.Array:
    """Whether the last call of a wrapper moved its parameters."""
    if isinstance(wrapper, SkipBadStepsState | DynamicLossScaleState):
        takes_step = ~wrapper.left_out
    else:
        takes_step = (wrapper.mini_step == 0) & (wrapper.gradient_step > 0)
    return takes_step & has_moved(tuple(wrapper))  # one of its fields is the state inside


def _inside(state: optax.OptState, kinds: tuple[type[Any], ...]) -> list[Any]:
    """The outermost states of some kinds in a state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def _check_all_given(leaves: Leaves, gradients: list[Any]) -> None:
    """Checks that every parameter has a gradient."""
    for index, gradient in enumerate(gradients):
        if gradient is None:
            raise ValueError(
                "updates must have a gradient for each parameter, because accumulate_gradients "
                f"sums them; that of {leaf_names(leaves.tree)[index]!r} is None. Give `init` and "
                "`update` only the parameters that have gradients (equinox: the same filter for "
                "both), hide the others with optax.partition or optax.masked, or give zeros."
            )


def _micro_batches(every: Any, macro_step: jax.Array) -> Any:
    """The micro-batches in a macro-batch; raises on fewer than 1, if the number is known."""
    if not callable(every):
        return every
    wanted = arguments.number_at(macro_step, "every", every, "[1, inf)")
    if not isinstance(wanted, Tracer):
        arguments.known_number(f"every, at the macro-batch {macro_step},", wanted, "[1, inf)")
    return jnp.ceil(wanted).astype(jnp.int32)


def _check_schedule(every: Any) -> None:
    """Checks the schedule `every` at some steps, because a compiled step cannot raise."""
    if callable(every):
        # Some numbers go to a device here, though a trainer may have forbidden it for its steps.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            for macro_step in (0, *(2**power for power in range(31)), 2**31 - 1):
                _micro_batches(every, jnp.asarray(macro_step, jnp.int32))


def _check_extra_args(examples: Any, flush: Any) -> None:
    """Checks the extra arguments of `update`, as far as they are known before it runs."""
    if examples is not None:
        arguments.check_number("examples", examples, "[0, inf)")
    arguments.check_condition("flush", flush)
    for name, value in (("examples", examples), ("flush", flush)):
        remedy = "Sum the examples with jax.lax.psum, and weight the gradients with those of each "
        check_same_everywhere(name, value, f"{remedy}device.")
