"""A change of the optimizer in the middle of a run that keeps its moments."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_integer
from optax_largebatch.params.leaves import leaves_of
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.transforms.adam import ScaleByAdamState
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.momentum import AccumulateMomentumState
from optax_largebatch.transforms.nesterov import NesterovSplitState
from optax_largebatch.transforms.trust_ratio import ScaleByTrustRatioState
from optax_largebatch.transforms.warmed_up_rate import ScaleByWarmedUpRateState
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState

_MOMENTS = (ScaleByAdamState, optax.ScaleByAdamState)
_BUFFERS = (AccumulateMomentumState, optax.TraceState)
_MACRO_BATCHES = (AccumulateGradientsState, optax.MultiStepsState)
_RATES = (ScaleByLearningRateState, ScaleByWarmedUpRateState)
_RATIOS = (ScaleByLarsState, ScaleByTrustRatioState)
_COUNT_BESIDE_OTHERS = (
    ScaleByLarsState,
    ScaleByLearningRateState,
    optax.schedules.InjectStatefulHyperparamsState,
)
"""States of several fields of which only the number of steps is taken over."""
_OF_THEIR_OWN = (NesterovSplitState, ScaleByWarmedUpRateState)
"""States that hold other states, and numbers that only their own optimizer collects."""


def adopt_state(
    optimizer: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    *,
    step: int | None = None,
) -> optax.OptState:
    r"""The state of an optimizer that goes on where another one stopped.

    The state takes over the moments of Adam, or the momentum buffer of SGD and LARS. It also takes
    over the number of steps, which schedules and bias corrections use. So the next steps are those
    of an optimizer that has seen all gradients. The moments must mean the same in both optimizers:
    the same `b1`, `b2` or `momentum`, and gradients clipped in the same way. Moments go from states

    - of `optax.adam`, `adamw` and `lamb` to `lamb`, `eve`, or a chain with `scale_by_adam`;
    - of `optax.lars` to `lars`;
    - of `optax.sgd` with momentum to a chain with `accumulate_momentum` before all trust ratios.

    SGD's momentum is of no use to `lars`, which sums gradients times trust ratios. Either optimizer
    may be inside `chain`, `inject_hyperparams` or another wrapper. In the middle of a macro-batch
    of `optax.MultiSteps`, its mean so far goes to `accumulate_gradients`. Other optimizers have
    moments of their own, which begin at zero: call their `init`.

    Args:
        optimizer: the new optimizer.
        params: the parameters as they are now.
        state: the old optimizer's state, of optax or of this library. Do not donate it later: the
            old and the new state share the arrays of the moments.
        step: the number of steps so far, where the state does not know it (`optax.sgd` with a
            constant learning rate) or knows several; None to read it from the state.

    Returns:
        A state of `optimizer`.

    Raises:
        TypeError: `step` is no integer.
        ValueError: one optimizer has moments that the other does not have, `params` and `state` do
            not belong together, or `step` is needed.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import adopt_state, lamb
        >>> params = {"kernel": jnp.array([3.0, -4.0])}
        >>> state = optax.adam(1e-3).init(params)
        >>> with jax.numpy_dtype_promotion("standard"):  # the default of jax
        ...     updates, state = optax.adam(1e-3).update(params, state, params)
        >>> state = adopt_state(lamb(1e-3), params, state)
        >>> updates, state = lamb(1e-3).update(params, state, params)
        >>> print(state[2].count, state[2].mu["kernel"].round(2))
        2 [ 0.57 -0.76]
    """
    if step is not None:
        check_integer("step", step, at_least=0)
    old = list(_parts(state))
    steps = _steps(old) if step is None else step
    wanted = optimizer.init(params)
    for kinds, what in ((_MOMENTS, "moments of Adam"), (_BUFFERS, "a momentum buffer")):
        new = [part for part in _parts(wanted) if isinstance(part, kinds)]
        found = [part for part in old if isinstance(part, kinds)]
        if len(new) != len(found) or len(found) > 1:
            raise ValueError(
                f"state must hold what optimizer needs, once: state has {what} {len(found)} times, "
                f"and optimizer has {what} {len(new)} times. optimizer.init(params) begins "
                "without the gradients so far."
            )
    if _momentum(wanted) != _momentum(state):
        raise ValueError(
            f"state must have a momentum of the same kind: state has one of {_momentum(state)}, "
            f"and optimizer has one of {_momentum(wanted)}. The momentum of optax.sgd fits "
            "chain(accumulate_momentum(0.9), scale_by_trust_ratio(0.001), "
            "scale_by_learning_rate(...)), and that of optax.lars fits lars(...)."
        )
    return _Adoption(params, old, steps).adopted(wanted)


class _Adoption:
    """Puts the parts of an old state into the places of a new one."""

    def __init__(self, params: optax.Params, old: list[Any], steps: int):
        self.leaves = leaves_of("params", params)
        self.old = old
        self.steps = steps

    def adopted(self, part: Any) -> Any:
        """A part of the new state, with what the old state has for it."""
        if not isinstance(part, tuple | list | dict):
            return part
        if isinstance(part, _MOMENTS):
            old = self.one(_MOMENTS)
            mu, nu = self.like(part.mu, old.mu), self.like(part.nu, old.nu)
            return part._replace(count=jnp.array(old.count, jnp.int32), mu=mu, nu=nu)
        if isinstance(part, _BUFFERS):
            return part._replace(trace=self.like(part.trace, self.one(_BUFFERS).trace))
        if isinstance(part, AccumulateGradientsState):
            return self.macro_batch(part)
        if isinstance(part, dict):
            return type(part)((key, self.adopted(own)) for key, own in part.items())
        if not hasattr(part, "_fields"):
            return type(part)(map(self.adopted, part))
        new: Any = type(part)(*map(self.adopted, part))
        if new._fields == ("count",) or isinstance(part, _COUNT_BESIDE_OTHERS):
            return new._replace(count=jnp.full_like(new.count, self.steps))
        if isinstance(part, _OF_THEIR_OWN) or "count" in new._fields:
            raise ValueError(
                f"optimizer has a {type(part).__name__}, whose numbers no other optimizer "
                "keeps. Begin with optimizer.init(params)."
            )
        return new

    def macro_batch(self, part: AccumulateGradientsState) -> AccumulateGradientsState:
        """The state of `accumulate_gradients`, in the middle of a macro-batch or at its begin."""
        new = part._replace(
            macro_step=jnp.full_like(part.macro_step, self.steps),
            inner_state=self.adopted(part.inner_state),
        )
        old = self.one(_MACRO_BATCHES)
        if isinstance(old, AccumulateGradientsState):
            sums = self.like(part.accumulator, old.accumulator)
            counts = {"micro_step": old.micro_step, "examples": old.examples}
        elif old is not None:
            means = self.like(part.accumulator, old.acc_grads)
            sums = jax.tree.map(lambda mean: mean * old.mini_step.astype(mean.dtype), means)
            counts = {"micro_step": old.mini_step, "examples": old.mini_step}
        else:
            return new
        counts = {name: jnp.array(x, getattr(part, name).dtype) for name, x in counts.items()}
        return new._replace(accumulator=sums, **counts)

    def one(self, kinds: tuple[type, ...]) -> Any:
        """The part of the old state of these kinds, or None."""
        return next((part for part in self.old if isinstance(part, kinds)), None)

    def like(self, new: Any, old: Any) -> Any:
        """A tree of the old state, cast to the dtypes of the new one."""
        columns = zip(
            self.leaves.align("the new state's moments", new),
            self.leaves.align("the moments in state", old),
            strict=True,
        )
        taken = []
        for index, (own, other) in enumerate(columns):
            shape = getattr(other, "shape", other)
            if own.shape != shape:
                raise ValueError(
                    f"the moments in state must have the shapes of params: "
                    f"{leaf_names(self.leaves.tree)[index]!r} has {own.shape} and its moments "
                    f"have {shape}. Pass the parameters that the old optimizer moved, and from a "
                    "state of pmap one replica."
                )
            taken.append(jnp.asarray(other, own.dtype))
        return self.leaves.rebuild(taken)


def _parts(node: Any) -> Iterator[Any]:
    """The NamedTuples of a state, but for what is inside of moments."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        yield node
    if isinstance(node, tuple | list | dict) and not isinstance(node, (*_MOMENTS, *_BUFFERS)):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _parts(part)


def _steps(old: list[Any]) -> int:
    """The number of steps that the parts of a state agree on."""
    counts = {int(part.count) for part in old if "count" in part._fields}
    counts |= {
        int(jnp.asarray(part.gradient_step)) for part in old if isinstance(part, _MACRO_BATCHES)
    }
    if len(counts) != 1:
        known = f"has counted {sorted(counts)}" if counts else "has counted none"
        raise ValueError(
            f"step must be given: how many steps were taken? The state {known}. Schedules of the "
            "new optimizer go on from it."
        )
    return counts.pop()


class _Momentum(NamedTuple):
    """What a momentum buffer sums."""

    of_ratios: bool
    """Gradients times trust ratios."""
    of_rates: bool
    """Gradients times learning rates."""

    def __str__(self) -> str:
        factors = ["trust ratios"] * self.of_ratios + ["learning rates"] * self.of_rates
        return " times ".join(["gradients", *factors])


def _momentum(node: Any) -> _Momentum | None:
    """What the momentum buffer in a state sums, None if there is none.

    Links without a state, such as a constant learning rate of optax, leave no trace but their
    place. Two that are masked, one more and then momentum is `optax.lars`.
    """
    if not isinstance(node, tuple | list | dict):
        return None
    parts = list(node.values() if isinstance(node, dict) else node)
    buffers = [at for at, part in enumerate(parts) if isinstance(part, _BUFFERS)]
    if not buffers:
        return next(filter(None, map(_momentum, parts)), None)
    before = parts[: buffers[0]]
    rates = any(isinstance(part, _RATES) for part in before)
    ratios = any(isinstance(part, _RATIOS) for part in before)
    if isinstance(parts[buffers[0]], AccumulateMomentumState):
        return _Momentum(ratios, rates)
    masked = [isinstance(part, optax.MaskedState) for part in before]
    return _Momentum(masked == [True, True, False], bool(before) and buffers[0] + 1 == len(parts))
