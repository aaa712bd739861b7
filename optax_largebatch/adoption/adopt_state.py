"""The state of an optimizer that goes on where another one stopped."""

from typing import Any

from jax.core import Tracer
import jax.numpy as jnp
import optax

from optax_largebatch.adoption.checks import (
    check_one_model,
    check_optimizer,
    check_same_kinds,
    check_state,
)
from optax_largebatch.adoption.hidden import columns, rebuilt
from optax_largebatch.adoption.macro_batch import check_a_place, taken_over
from optax_largebatch.adoption.moments import Moments
from optax_largebatch.adoption.momentum import check_same_momentum
from optax_largebatch.adoption.parts import (
    BUFFERS,
    LIKE_PARAMETERS,
    MACRO_BATCHES,
    MEANS,
    MOMENTS,
    counters,
    parts,
)
from optax_largebatch.adoption.same_moments import check_same_moments
from optax_largebatch.arguments import Scalar, check_integer, check_number
from optax_largebatch.params.leaves import Leaves, leaves_of
from optax_largebatch.params.paths import is_hidden, leaf_names
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.nesterov import NesterovSplitState
from optax_largebatch.transforms.warmed_up_rate import ScaleByWarmedUpRateState
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState

_COUNT_BESIDE_OTHERS = (
    HyperballState,
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
    examples_per_micro_batch: Scalar | None = None,
    old_optimizer: optax.GradientTransformation | None = None,
) -> optax.OptState:
    r"""The state of an optimizer that goes on where another one stopped.

    The state takes over the moments of Adam, the momentum of Muon, or the momentum buffer of SGD
    and LARS. It also takes over the number of steps, which schedules and bias corrections use. So
    the next steps are those of an optimizer that has seen all gradients. Moments go from states

    - of `optax.adam`, `adamw` and `lamb` to `lamb`, `eve`, `adamh`, or a chain with
      `scale_by_adam`;
    - of all these and of `optax.contrib.muon` to `muon` and `muonh`, and from these to each other;
    - of `optax.lars` to `lars`;
    - of `optax.sgd` with momentum to a chain with `accumulate_momentum` before all trust ratios.

    SGD's momentum is of no use to `lars`, which sums gradients times trust ratios. Either optimizer
    may be inside `chain`, `inject_hyperparams` or another wrapper. Other optimizers have moments of
    their own, which begin at zero: call their `init`.

    **Muon.** The momentum of Muon is a mean of gradients, and so is the first moment of Adam.
    Therefore a matrix takes its momentum from either, and the parameters beside the matrices take
    both moments of Adam. Muon keeps no second moment, so a matrix cannot go from Muon to Adam: this
    is an error. Moments are taken as they are, even if Adam's `b1` is not Muon's `beta` (their
    defaults are 0.9 and 0.95); only `old_optimizer` compares the two. With `radius="start"` the
    spheres of `muonh` and `adamh` get their radii in the first step after the change.

    **The moments must mean the same in both optimizers**: the same `b1` (of Muon: `beta`), `b2` or
    `momentum`, and gradients clipped in the same way. A state does not say so. The states of these
    optimizers are of Adam's class, but their numbers are not Adam's moments:

    - `optax.adamax` and `adamaxw`: `nu` is a maximum;
    - `optax.yogi`: `nu` begins at 1e-6 and is added to in another way;
    - `optax.contrib.adopt`: `mu` is a mean of normalised gradients;
    - `scale_by_adam` with `grad_averaging=False`: `mu` is a sum, as in `muon` with the same.

    In the same way, `accumulate_momentum` with `averaging=True` keeps a mean where others keep a
    sum. And in a chain of optax, a constant learning rate leaves nothing in the state, so that a
    link behind the momentum is taken for it. All these are accepted, and the steps are wrong. Pass
    `old_optimizer` to have them refused.

    **Several optimizers.** By `optax.partition` each parameter may have its own. It then takes the
    moments of the one that moved it.

    **Frozen parameters.** Both optimizers may hide a parameter, by `optax.masked` or by
    `optax.partition` with `optax.set_to_zero`. If only the new one hides it, its moments are
    dropped. If only the old one hides it, it has no moments, and this is an error.

    **Macro-batches.** In the middle of a macro-batch of `optax.MultiSteps` or
    `accumulate_gradients`, its gradients so far go to `accumulate_gradients`. An optimizer that
    does not accumulate takes a state over between two macro-batches only. `optax.MultiSteps` must
    take means (with `use_grad_mean=False` it takes sums).

    Args:
        optimizer: the new optimizer.
        params: the parameters as they are now.
        state: the old optimizer's state, of optax or of this library. Do not donate it later: the
            old and the new state share the arrays of the moments.
        step: the number of steps so far, where the state does not know it (`optax.sgd` with a
            constant learning rate, or a state inside `jax.jit`) or knows several; None to read it
            from the state.
        examples_per_micro_batch: the number of examples in each micro-batch so far, positive. You
            need it in the middle of a macro-batch of `optax.MultiSteps`, which does not count them.
            If you will not pass `examples` to `update`, give 1.
        old_optimizer: the optimizer that `state` is of, to check that its moments mean the same as
            those of `optimizer`. Both are compiled and take three steps with the same gradients, on
            parameters of few elements; their moments must then be equal. None for no check.

    Returns:
        A state of `optimizer`.

    Raises:
        TypeError: an argument has the wrong type, such as a `TrainState` in place of the
            optimizer's state in it.
        ValueError: one optimizer has moments that the other does not have, or that mean something
            else; `params` and `state` do not belong together; `state` has an axis for several
            models; micro-batches would be lost; or `step` or `examples_per_micro_batch` is needed.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import adopt_state, lamb
        >>> params = {"kernel": jnp.array([3.0, -4.0])}
        >>> state = optax.adam(1e-3).init(params)
        >>> with jax.numpy_dtype_promotion("standard"):  # the default of jax
        ...     updates, state = optax.adam(1e-3).update(params, state, params)
        >>> state = adopt_state(lamb(1e-3), params, state, old_optimizer=optax.adam(1e-3))
        >>> updates, state = lamb(1e-3).update(params, state, params)
        >>> print(state[2].count, state[2].mu["kernel"].round(2))
        2 [ 0.57 -0.76]
    """
    check_optimizer("optimizer", optimizer)
    check_state(state)
    if step is not None:
        check_integer("step", step, at_least=0)
    if examples_per_micro_batch is not None:
        check_number("examples_per_micro_batch", examples_per_micro_batch, "(0, inf)")
    leaves = leaves_of("params", params)
    old = list(parts(state))
    check_one_model(old)
    steps = _steps(old) if step is None else step
    wanted = optimizer.init(params)
    new = list(parts(wanted))
    check_same_kinds(leaves, old, new)
    check_a_place(old, new)
    if old_optimizer is None:
        check_same_momentum(state, wanted)
    else:
        check_optimizer("old_optimizer", old_optimizer)
    adopted = _Adoption(leaves, old, steps, examples_per_micro_batch).adopted(wanted)
    if old_optimizer is not None:
        check_same_moments(old_optimizer, optimizer, params, state)
    return adopted


class _Adoption:
    """Puts the parts of an old state into the places of a new one."""

    def __init__(self, leaves: Leaves, old: list[Any], steps: int, examples: Any):
        self.leaves = leaves
        self.old = old
        self.moments = Moments("the moments in state", leaves, old)
        self.steps = steps
        self.examples_per_micro_batch = examples

    def adopted(self, part: Any) -> Any:
        """A part of the new state, with what the old state has for it."""
        if not isinstance(part, tuple | list | dict):
            return part
        if isinstance(part, MEANS):
            return self.means(part)
        if isinstance(part, BUFFERS):
            old = self.one(BUFFERS)
            return part._replace(trace=self.like("moments", part.trace, old.trace))
        if isinstance(part, MACRO_BATCHES):
            return self.macro_batch(part)
        if isinstance(part, dict):
            return type(part)((key, self.adopted(own)) for key, own in part.items())
        if not hasattr(part, "_fields"):
            return type(part)(map(self.adopted, part))
        named: Any = part
        fields = zip(named._fields, named, strict=True)
        new: Any = type(part)(
            *(own if name in LIKE_PARAMETERS else self.adopted(own) for name, own in fields)
        )
        if new._fields == ("count",) or isinstance(part, _COUNT_BESIDE_OTHERS):
            return new._replace(count=jnp.full_like(new.count, self.steps))
        if "step" in new._fields:  # of optax.conditionally_mask and conditionally_transform
            return new._replace(step=jnp.full_like(new.step, self.steps))
        if isinstance(part, _OF_THEIR_OWN) or "count" in new._fields or self.has_moments(part):
            raise ValueError(
                f"optimizer has a {type(part).__name__}, whose numbers no other optimizer "
                "keeps. Begin with optimizer.init(params)."
            )
        return new

    def means(self, part: Any) -> Any:
        """A state of Adam or Muon, with the moments of the parameters that it moves."""
        mu = self.like("moments", part.mu, self.moments.first)
        count = jnp.array(self.moments.count(part, self.steps), jnp.int32)
        new = part._replace(count=count, mu=mu)
        if not isinstance(part, MOMENTS):
            return new
        self.moments.check_second(part)
        return new._replace(nu=self.like("moments", part.nu, self.moments.second))

    def macro_batch(self, part: Any) -> Any:
        """The state of gradient accumulation, in the middle of a macro-batch or at its begin."""
        old = self.one(MACRO_BATCHES)
        new = taken_over(part, old, self.examples_per_micro_batch, self.like)
        if isinstance(part, AccumulateGradientsState):
            step, inner = "macro_step", "inner_state"
        else:
            step, inner = "gradient_step", "inner_opt_state"
        steps = jnp.full_like(getattr(part, step), self.steps)
        return new._replace(**{step: steps, inner: self.adopted(getattr(part, inner))})

    def one(self, kinds: tuple[type, ...]) -> Any:
        """The part of the old state of these kinds, or None."""
        return next((part for part in self.old if isinstance(part, kinds)), None)

    def like(self, what: str, new: Any, old: Any) -> Any:
        """A tree of the old state, cast to the dtypes of the new one."""
        pairs = zip(
            columns(self.leaves, f"the {what} of optimizer", new),
            columns(self.leaves, f"the {what} in state", old),
            strict=True,
        )
        taken = []
        for index, (own, other) in enumerate(pairs):
            if is_hidden(own):
                taken.append(own)
                continue
            if is_hidden(other):
                raise ValueError(
                    f"state has no {what} of {leaf_names(self.leaves.tree)[index]!r}: the old "
                    "optimizer did not move it (optax.masked, optax.partition). If the new one "
                    "must not move it either, hide it there too, for example by optax.partition "
                    "with optax.set_to_zero(). If it must, begin with optimizer.init(params)."
                )
            shape = getattr(other, "shape", None)
            if own.shape != shape:
                found = type(other).__name__ if shape is None else shape
                raise ValueError(
                    f"the {what} in state must have the shapes of params: "
                    f"{leaf_names(self.leaves.tree)[index]!r} has {own.shape} and its {what} have "
                    f"{found}. Pass the parameters that the old optimizer moved, and from a state "
                    "of pmap one replica."
                )
            taken.append(jnp.asarray(other, own.dtype))
        return rebuilt(new, taken)

    def has_moments(self, part: Any) -> bool:
        """Whether a state of another library keeps an array for each parameter."""
        if type(part).__module__.startswith("optax_largebatch."):
            return False
        return any(map(self.is_like_params, part))

    def is_like_params(self, tree: Any) -> bool:
        """Whether a tree has the structure, the shapes and the kind of numbers of params."""
        try:
            columns = zip(self.leaves.arrays, self.leaves.treedef.flatten_up_to(tree), strict=True)
        except ValueError:
            return False
        shown = [(array, own) for array, own in columns if not is_hidden(own)]
        return bool(shown) and all(
            getattr(own, "shape", None) == array.shape and jnp.issubdtype(own.dtype, jnp.floating)
            for array, own in shown
        )


def _steps(old: list[Any]) -> int:
    """The number of steps that the parts of a state agree on."""
    counts = [counters(part) for part in old]
    numbers = [own[name] for own in counts for name in ("count", "gradient_step") if name in own]
    if any(isinstance(number, Tracer) for number in numbers):
        raise ValueError(
            "step must be given inside jax.jit and jax.vmap, where the counts in state are not "
            "known: how many steps were taken? Or call adopt_state outside."
        )
    known = {int(number) for number in numbers}
    if len(known) != 1:
        said = f"has counted {sorted(known)}" if known else "has counted none"
        raise ValueError(
            f"step must be given: how many steps were taken? The state {said}. Schedules of the "
            "new optimizer go on from it."
        )
    return known.pop()
