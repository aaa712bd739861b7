"""A macro-batch that is half done when the optimizer changes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.adoption.parts import MACRO_BATCHES
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState


def check_a_place(old: list[Any], new: list[Any]) -> None:
    """Checks that no micro-batches are lost.

    Args:
        old: the parts of the old state.
        new: the parts of the new state.

    Raises:
        ValueError: the old state has micro-batches of the next step, or may have them, and the new
            state has no place for them.
    """
    for part in old:
        if not isinstance(part, MACRO_BATCHES) or any(_takes(one, part) for one in new):
            continue
        if isinstance(part.mini_step, Tracer):
            raise ValueError(
                "adopt_state must be called outside of jax.jit here: optimizer has no place for "
                f"the micro-batches in a {type(part).__name__}, and inside it is not known "
                "whether there are any."
            )
        if part.mini_step != 0:
            raise ValueError(
                f"state must be between two macro-batches: the mini_step of its "
                f"{type(part).__name__} is {part.mini_step}, and optimizer has no place for the "
                "micro-batches so far. Finish the macro-batch with the old optimizer "
                "(accumulate_gradients: update(..., flush=True)), or put accumulate_gradients "
                "around the new one."
            )


def taken_over(
    new: Any, old: Any, examples_per_micro_batch: Any, like: Callable[[str, Any, Any], Any]
) -> Any:
    """The new state of gradient accumulation, with the micro-batches of the old one.

    Args:
        new: the state of an accumulation that begins.
        old: the old optimizer's, or None.
        examples_per_micro_batch: the argument of `adopt_state`.
        like: casts a tree of the old state to the dtypes of the new one.
    """
    if not _takes(new, old):
        return new
    what = "gradients so far"
    if isinstance(new, optax.MultiStepsState):
        return new._replace(
            mini_step=jnp.array(old.mini_step, jnp.int32),
            acc_grads=like(what, new.acc_grads, old.acc_grads),
        )
    micro_step = jnp.array(old.mini_step, new.micro_step.dtype)
    if isinstance(old, AccumulateGradientsState):
        _check_examples(old, examples_per_micro_batch)
        shapes = [jax.tree.map(jnp.shape, one.small_batches) for one in (new, old)]
        parts = old.small_batches if shapes[0] == shapes[1] else new.small_batches
        return new._replace(
            micro_step=micro_step,
            examples=jnp.array(old.examples, new.examples.dtype),
            accumulator=like(what, new.accumulator, old.accumulator),
            small_batches=jax.tree.map(jnp.array, parts),  # copies, so that either can be donated
        )
    examples = micro_step * jnp.asarray(_given(old, examples_per_micro_batch), new.examples.dtype)
    means = like(what, new.accumulator, old.acc_grads)
    return new._replace(
        micro_step=micro_step,
        examples=examples,
        accumulator=jax.tree.map(lambda mean: mean * examples.astype(mean.dtype), means),
    )


def _takes(new: Any, old: Any) -> bool:
    """Whether one gradient accumulation can go on with the micro-batches of another."""
    if not isinstance(old, MACRO_BATCHES):
        return False
    return isinstance(new, AccumulateGradientsState) or (
        isinstance(new, optax.MultiStepsState) and isinstance(old, optax.MultiStepsState)
    )


def _given(old: optax.MultiStepsState, examples_per_micro_batch: Any) -> Any:
    """The weight of a micro-batch of `optax.MultiSteps`."""
    if examples_per_micro_batch is not None:
        return examples_per_micro_batch
    traced = isinstance(old.mini_step, Tracer)
    if traced or old.mini_step != 0:
        mini_step = "not known inside jax.jit" if traced else old.mini_step
        raise ValueError(
            "examples_per_micro_batch must be given in the middle of a macro-batch: the mini_step "
            f"of the MultiStepsState is {mini_step}, and optax.MultiSteps does not count examples. "
            "Give the number of examples in each micro-batch if you will pass `examples` to "
            "`update`, and 1 if you will not."
        )
    return 1


def _check_examples(old: AccumulateGradientsState, examples_per_micro_batch: Any) -> None:
    """Checks that `examples_per_micro_batch` agrees with a state that counts examples itself."""
    known = (old.micro_step, old.examples, examples_per_micro_batch)
    if examples_per_micro_batch is None or any(isinstance(x, Tracer) for x in known):
        return
    if not np.isclose(old.examples, old.micro_step * examples_per_micro_batch):
        raise ValueError(
            f"examples_per_micro_batch={examples_per_micro_batch} is not what state has counted: "
            f"{old.examples:g} examples in {old.micro_step} micro-batches. Leave it out: the state "
            "of accumulate_gradients knows. To begin to pass `examples` to `update`, finish the "
            "macro-batch first."
        )
