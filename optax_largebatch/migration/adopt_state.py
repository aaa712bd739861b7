"""The state of an optimizer that goes on where another one stopped."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_integer
from optax_largebatch.engine.recorded_states import recorded_states
from optax_largebatch.migration import moments
from optax_largebatch.migration.new_state import NewState, known
from optax_largebatch.migration.same_moments import check_same_moments
from optax_largebatch.params.leaves import leaves_of
from optax_largebatch.transforms.nesterov import NesterovSplitState


def adopt_state(
    optimizer: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    *,
    step: int | None = None,
    old_optimizer: optax.GradientTransformation | None = None,
) -> optax.OptState:
    r"""The state of an optimizer that goes on where another one stopped.

    The moments and the number of steps go over, so the next steps are those of an optimizer that
    has seen all gradients, and schedules go on. Moments go from states

    - of `optax.adam`, `adamw` and `lamb` to `lamb`, `eve`, `adamh`, or a chain with
      `scale_by_adam`;
    - of all these and of `optax.contrib.muon` to `muon` and `muonh`, and from these to each other;
    - of Muon and MuonH in Levanter and Marin to `muon` and `muonh` with `grad_averaging=False`,
      `bias_correction="none"` and the same `nesterov`, because their momentum is a sum;
    - of `optax.lars` to `lars`;
    - of `optax.sgd` with momentum to a chain with `accumulate_momentum` before all trust ratios.
      (It is of no use to `lars`, which sums gradients times trust ratios.)

    The way back is the same call. Either optimizer may be inside `chain`, `inject_hyperparams` or
    another wrapper; by `optax.partition` each parameter may have its own. Other optimizers have
    moments of their own, which begin at zero: call their `init`.

    **Muon.** The momentum of Muon is a mean of gradients, and so is the first moment of Adam.
    Therefore a matrix takes its momentum from either, and the parameters beside the matrices take
    both moments of Adam. Muon keeps no second moment, so a matrix cannot go from Muon to Adam: this
    is an error. The radii of `radius="start"` go over too. A block that had none takes it at its
    next step. So do the second moments of `normalize_neurons`, where they have the same shape. All
    others begin at 0.

    **The moments must mean the same in both optimizers**: the same `b1` (of Muon: `beta`), `b2` or
    `momentum`, and gradients clipped in the same way. A state does not say so. Pass `old_optimizer`
    to have them compared; for a momentum buffer, as of SGD and LARS, you must. Without it, these
    are accepted, and the steps are wrong:

    - Adam's `b1` is not Muon's `beta` (their defaults are 0.9 and 0.95);
    - one sums gradients, as with `grad_averaging=False`, and the other averages them;
    - a state of Adam's class holds other numbers: `nu` of `optax.adamax` and `adamaxw` is a
      maximum, that of `optax.yogi` begins at 1e-6, and `mu` of `optax.contrib.adopt` is a mean of
      normalised gradients.

    **Checkpoints without types.** A state may have dictionaries and lists in the place of
    NamedTuples and tuples, as Orbax restores it without a target. A dictionary counts as the
    NamedTuple that has its keys as fields. `optax.adabelief` has those of Adam: pass
    `old_optimizer`.

    **States of version 0.1.0.** Those of `muon`, `muonh`, `adamh`, `cain`, `scaled_adam` and
    `learned_gradient` had another layout. Restore such a checkpoint without a target, and pass the
    state with the same optimizer of this version; for `cain` and `scaled_adam`, which have a
    momentum buffer, also as `old_optimizer`.

    **Frozen parameters.** Both optimizers may hide a parameter, by `optax.masked` or by
    `optax.partition` with `optax.set_to_zero`. If only the new one hides it, its moments are
    dropped. If only the old one hides it, it has no moments, and this is an error.

    **Wrappers.** Finish a macro-batch of `optax.MultiSteps` or `accumulate_gradients` first. The
    masters of `master_weights` go over, and so do the average and the steps of `average_weights`,
    and the steps of `stochastic_rounding`. If the old optimizer had none, the steps go on from
    those of the run, and the average begins with the next weights.

    **What begins anew:** loss scales, noise scales, the norms or losses in which `skip_bad_steps`
    looks for spikes, counts of skipped steps, and what a state says of the last step: learning
    rates, trust ratios and angles.

    Args:
        optimizer: the new optimizer.
        params: the parameters as they are now.
        state: the old optimizer's state, of optax, of this library, or with the same fields. Do not
            donate it later: the old and the new state share the arrays of the moments and averages.
        step: the number of steps so far, where the state does not know it (`optax.sgd` with a
            constant learning rate, or a state inside `jax.jit`) or knows several; None to read it
            from the state.
        old_optimizer: the optimizer that `state` is of, to check that its moments mean the same as
            those of `optimizer`. Both are compiled and take three steps with the same gradients, on
            parameters of few elements; their moments must then be equal. None for no check.

    Returns:
        A state of `optimizer`. Moments, masters and averages stay on their devices, and the rest is
        where `optimizer.init(params)` puts it.

    Raises:
        TypeError: `state` is a `TrainState` or the like; pass the optimizer's state in it.
        ValueError: one optimizer has moments that the other does not have, or that mean something
            else; `params` and `state` do not belong together; `state` has an axis for several
            models, is in the middle of a macro-batch, or averages other weights; or `step` or
            `old_optimizer` is needed.

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
        >>> print(state[1].count, state[1].mu["kernel"].round(2))
        2 [ 0.57 -0.76]
    """
    _check_optimizer("optimizer", optimizer)
    if not isinstance(state, tuple | list | Mapping):
        raise TypeError(
            "state must be the state of an optimizer, as its `update` returns it; got a "
            f"{type(state).__name__}. A TrainState or an nnx.Optimizer has it as its opt_state."
        )
    if step is not None:
        check_integer("step", step, at_least=0)
    leaves_of("params", params)
    old = moments.Kept("state", params, state)
    _check_counters(old)
    steps = _steps(old) if step is None else step
    # Many an `init` makes its arrays of Python's numbers, which a guard would take for a mistake.
    with jax.transfer_guard("allow"), recorded_states() as made:
        wanted = optimizer.init(params)
    _check_same_kinds(old, moments.Kept("optimizer", params, wanted))
    adopted = NewState(old, steps, made).of(wanted)
    if old_optimizer is not None:
        _check_optimizer("old_optimizer", old_optimizer)
        check_same_moments(old_optimizer, optimizer, old)
    elif any(moment and moment.what == moments.BUFFER for moment in old.moments):
        raise ValueError(
            "old_optimizer must be given, because state has a momentum buffer: it does not say "
            "whether it is a sum or a mean, and whether of gradients or of steps. Pass the "
            "optimizer that state is of, as in adopt_state(optimizer, params, state, "
            "old_optimizer=optax.sgd(0.1, momentum=0.9)): the two buffers are then compared."
        )
    return adopted


def _check_optimizer(name: str, optimizer: object) -> None:
    """Checks that an argument is an optimizer; `optax.MultiSteps` is one, too."""
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"{name} must be a gradient transformation, got {optimizer!r}. Pass one, as lamb(1e-3)."
        )


def _check_counters(old: moments.Kept) -> None:
    """Checks that the state is of one model, and not in the middle of a macro-batch."""
    for part in old.parts:
        for name, value in moments.counters(part, (*moments.STEPS, *moments.MICRO_STEPS)).items():
            if jnp.ndim(value):
                raise ValueError(
                    f"state must be that of one model: the {name} of its {part.kind.__name__} has "
                    f"the shape {jnp.shape(value)}, with an axis for the copies of jax.pmap or the "
                    "models of jax.vmap. Pass one, as in jax.tree.map(lambda x: x[0], (params, "
                    "state)), or map adopt_state over the models by jax.vmap, and give step."
                )
            if name in moments.MICRO_STEPS and known(value) != [0]:
                now = (known(value) or ["not known inside jax.jit"])[0]
                raise ValueError(
                    f"state must be between two macro-batches, and its {name} is {now}. Finish the "
                    "macro-batch with the old optimizer first (accumulate_gradients: update(..., "
                    "flush=True)), and call adopt_state then."
                )


def _steps(old: moments.Kept) -> int:
    """The number of steps that the parts of a state agree on."""
    counts = [moments.counters(part, moments.STEPS) for part in old.parts]
    numbers = known(counts)
    if numbers is None:
        raise ValueError(
            "step must be given inside jax.jit and jax.vmap, where the counts in state are not "
            "known: how many steps were taken? Or call adopt_state outside."
        )
    if len(numbers) != 1:
        said = f"has counted {numbers}" if numbers else "has counted none"
        raise ValueError(
            f"step must be given: how many steps were taken? The state {said}. Schedules of the "
            "new optimizer go on from it."
        )
    return numbers[0]


def _check_same_kinds(old: moments.Kept, new: moments.Kept) -> None:
    """Checks that the old state has the moments that the new one needs, and not only others."""
    if any(part.is_one(NesterovSplitState) for part in old.parts):
        raise ValueError(
            "state has a NesterovSplitState, as that of lans, whose moments may be those of "
            "normalised gradients. Begin with optimizer.init(params)."
        )
    has, wants = ({one.what for one in kept.moments if one} for kept in (old, new))
    if bool(has) != bool(wants):
        has, wants = (", ".join(sorted(x)) or "no moments" for x in (has, wants))
        raise ValueError(
            f"state must hold what optimizer needs: state has {has}, and optimizer has {wants}. "
            "optimizer.init(params) begins without the gradients so far."
        )
    for name, has, wants in zip(new.names, old.moments, new.moments, strict=True):
        if wants is None:
            continue
        if has is None:
            raise ValueError(
                f"state has no moments of {name!r}: the old optimizer did not move it "
                "(optax.masked, optax.partition). If the new one must not move it either, hide it "
                "there too. If it must, begin with optimizer.init(params)."
            )
        if (has.what, wants.what) == (moments.MUON, moments.ADAM):
            raise ValueError(
                f"state has no second moment of {name!r}: Muon moved it and keeps only a first "
                "moment, but optimizer moves it by Adam, which needs both. Let it move it by Muon "
                "(see matrix_mask of muon), or begin with optimizer.init(params)."
            )
        if has.what != wants.what and (has.what, wants.what) != (moments.ADAM, moments.MUON):
            raise ValueError(
                f"state has {has.what} of {name!r}, and optimizer needs {wants.what}, which is "
                "something else. optimizer.init(params) begins without the gradients so far."
            )
        for field, like in wants.arrays.items():
            shape = jnp.shape(has.arrays.get(field, has.first))
            if shape != jnp.shape(like):
                raise ValueError(
                    "the moments in state must have the shapes of params: "
                    f"{name!r} has {jnp.shape(like)} and its moments have {shape}. Pass the "
                    "parameters that the old optimizer moved, and from a state of pmap one replica."
                )
