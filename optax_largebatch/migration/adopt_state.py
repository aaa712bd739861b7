"""The state of an optimizer that goes on where another one stopped."""

from collections.abc import Callable, Mapping
from typing import Any
import warnings

import jax
from jax.core import Tracer
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_integer
from optax_largebatch.migration import moments
from optax_largebatch.migration.conversion import Conversion
from optax_largebatch.migration.new_state import NewState, known, left_out, made_parts
from optax_largebatch.migration.same_moments import compare_moments
from optax_largebatch.params.leaves import leaves_of
from optax_largebatch.params.masks import Mask, select_leaves
from optax_largebatch.params.owners import check_one_model
from optax_largebatch.transforms.nesterov import NesterovSplitState


def adopt_state(
    optimizer: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    *,
    step: int | None = None,
    old_optimizer: optax.GradientTransformation | None = None,
    old_params: optax.Params | None = None,
    convert: Callable[[optax.Params], optax.Params] | None = None,
    forget: Mask = None,
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
    both moments of Adam. Muon keeps no second moment, so a matrix cannot go from Muon to Adam: name
    it in `forget`. The radii of `radius="start"` go over too. A block that had none takes it at its
    next step. So do the second moments of `normalize_neurons`, which must be of the same neurons.

    **The moments must mean the same in both optimizers**: averages of gradients that are clipped in
    the same way, or sums with the same `momentum`. A state does not say so. Pass `old_optimizer` to
    have them compared; for a momentum buffer, as of SGD and LARS, you must. An average over another
    window (`b1` and `b2`, of Muon `beta`) is then multiplied by :math:`(1 - b'^t) / (1 - b^t)`, so
    that it is the same average after its bias correction. Without `old_optimizer` it is taken as it
    is, which late in a run is the same. These are then accepted, too, and the steps are wrong:

    - one sums gradients, as with `grad_averaging=False`, and the other averages them;
    - a state of Adam's class holds other numbers: `nu` of `optax.adamax` and `adamaxw` is a
      maximum, that of `optax.yogi` begins at 1e-6, and `mu` of `optax.contrib.adopt` is a mean of
      normalised gradients.

    **Other parameters.** Layers are stacked or not, queries, keys and values joined or split, a
    head is new, a vocabulary larger: pass the old parameters, and the function `convert` that made
    the new ones of them. What is like the parameters goes through it, too: moments, masters and
    averages. Numbers of blocks (angles, radii, trust ratios) and of neurons go with their elements.
    Elements that `convert` makes new have moments of 0. It must copy: it may stack, split, join,
    transpose, slice and pad, but not compute. A parameter of which nothing is old is named in
    `forget`. States of `cain`, `scaled_adam` and `learned_gradient` do not follow.

    **Checkpoints without types.** A state may have dictionaries and lists in the place of
    NamedTuples and tuples, as Orbax restores it without a target. A dictionary counts as the
    NamedTuple that has its keys as fields. `optax.adabelief` has those of Adam: pass
    `old_optimizer`.

    **Frozen parameters.** Both optimizers may hide a parameter, by `optax.masked` or by
    `optax.partition` with `optax.set_to_zero`. If only the new one hides it, its moments are
    dropped. If only the old one hides it, it has no moments: name it in `forget`.

    **Wrappers.** Finish a macro-batch of `optax.MultiSteps` or `accumulate_gradients` first. The
    masters of `master_weights` go over, and so do the average and the steps of `average_weights`,
    and the steps of `stochastic_rounding`. If the old optimizer had none, the steps go on from
    those of the run, and the average begins with the next weights.

    **What begins anew:** loss scales, noise scales, the norms or losses in which `skip_bad_steps`
    looks for spikes, and counts of skipped steps; a warning names them. So do what `forget` names,
    and radii of blocks that were not one block before.

    Args:
        optimizer: the new optimizer.
        params: the parameters as they are now.
        state: the old optimizer's state, of optax, of this library, or with the same fields. Do not
            donate it later: the old and the new state share the arrays of the moments and averages.
        step: the number of steps so far, where the state does not know it (`optax.sgd` with a
            constant learning rate) or knows several; None to read it from the state.
        old_optimizer: the optimizer that `state` is of, to check that its moments mean the same as
            those of `optimizer`. Both are compiled and take three steps with the same gradients, on
            parameters of few elements; their moments must then be equal, or averages of the same
            numbers. With `convert` it says which blocks there were, and nothing is compared: change
            the optimizer in a call of its own. None for no check.
        old_params: the parameters that `state` is of, if they are others. With new parameters of a
            lower precision, masters begin with these. None for `params`.
        convert: the function from the old parameters to the new ones. It is called with trees of
            numbers and moments in the place of `old_params`: once for each moment, and a few times
            on the host, which takes some 60 bytes of its memory for each parameter.
        forget: the new parameters that begin anew, such as `matching("head")`: their moments are 0,
            and a count that is theirs alone, too. A rule, or any other mask; None for none.

    Returns:
        A state of `optimizer`. Moments, masters and averages stay on their devices, and the rest is
        where `optimizer.init(params)` puts it.

    Raises:
        TypeError: `state` is a `TrainState` or the like; pass the optimizer's state in it.
        ValueError: one optimizer has moments that the other does not have, or that mean something
            else; `params` and `state` do not belong together; `convert` computes, or makes others
            than `params`; `state` has an axis for several models, is in the middle of a
            macro-batch, or averages other weights; `step`, `old_optimizer`, `old_params`,
            `convert` or `forget` is needed; or this is inside `jax.jit`.

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
    if old_optimizer is not None:
        _check_optimizer("old_optimizer", old_optimizer)
    if not isinstance(state, tuple | list | Mapping):
        raise TypeError(
            "state must be the state of an optimizer, as its `update` returns it; got a "
            f"{type(state).__name__}. A TrainState or an nnx.Optimizer has it as its opt_state."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, state))):
        raise ValueError(
            "adopt_state must be called outside of jax.jit and jax.vmap, because it reads counts "
            "and numbers of blocks; got traced arrays. Of several models, call it for each."
        )
    if step is not None:
        check_integer("step", step, at_least=0)
    leaves_of("params", params)
    old = moments.Kept("state", _old_params(params, old_params, convert), state)
    _check_counters(old)
    steps = _steps(old) if step is None else step
    made_before: dict[Any, Any] = {}
    # Many an `init` makes its arrays of Python's numbers, which a guard would take for a mistake.
    with jax.transfer_guard("allow"):
        wanted, made = made_parts(optimizer, params)
        if convert is not None:
            if old_optimizer is not None:
                jax.eval_shape(
                    lambda x: made_before.update(made_parts(old_optimizer, x)[1]), old_params
                )
            old = old.converted(Conversion(convert, old_params, params))
    new = moments.Kept("optimizer", params, wanted)
    if forget is not None:
        for kept in (old, new):
            kept.forget(select_leaves("forget", forget, params))
    _check_same_kinds(old, new)
    if old_optimizer is not None and convert is None:
        compare_moments(old_optimizer, optimizer, old, steps)
    adopted = NewState(old, new, steps, made, made_before).of(wanted)
    has_buffer = any(moment and moment.what == moments.BUFFER for moment in old.moments)
    if old_optimizer is None and has_buffer:
        raise ValueError(
            "old_optimizer must be given, because state has a momentum buffer: it does not say "
            "whether it is a sum or a mean, and whether of gradients or of steps. Pass the "
            "optimizer that state is of, as in adopt_state(optimizer, params, state, "
            "old_optimizer=optax.sgd(0.1, momentum=0.9)): the two buffers are then compared."
        )
    if names := left_out(old, new):
        warnings.warn(
            f"what {', '.join(names)} of state have collected does not go over: it begins anew, or "
            "optimizer has no such part. See `adopt_state`, What begins anew.",
            stacklevel=2,
        )
    return adopted


def _old_params(params: Any, old_params: Any, convert: Any) -> Any:
    """The parameters that the state is of."""
    if convert is not None and (old_params is None or not callable(convert)):
        raise TypeError(
            "convert must be a function from the old parameters to the new ones, and is given with "
            f"old_params; got {convert!r} and old_params of type {type(old_params).__name__}. Pass "
            "both, as in adopt_state(optimizer, params, state, old_params=old, convert=f)."
        )
    if old_params is None:
        return params
    shapes, old_shapes = (jax.tree.map(jnp.shape, tree) for tree in (params, old_params))
    if convert is None and shapes != old_shapes:
        raise ValueError(
            "convert must be given where old_params have another structure or other shapes than "
            f"params: got {old_shapes} and {shapes}. Pass the function that has made params."
        )
    return old_params


def _check_optimizer(name: str, optimizer: object) -> None:
    """Checks that an argument is an optimizer; `optax.MultiSteps` is one, too."""
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"{name} must be a gradient transformation, got {optimizer!r}. Pass one, as lamb(1e-3)."
        )


def _check_counters(old: moments.Kept) -> None:
    """Checks that the state is of one model, and not in the middle of a macro-batch."""
    for node in old.nodes:
        for name, value in moments.counters(node, (*moments.STEPS, *moments.MICRO_STEPS)).items():
            check_one_model(name, value, ndim=0)
            if name in moments.MICRO_STEPS and known(value) != [0]:
                raise ValueError(
                    f"state must be between two macro-batches, and its {name} is "
                    f"{known(value)[0]}. Finish the macro-batch with the old optimizer first "
                    "(accumulate_gradients: update(..., flush=True)), and call adopt_state then."
                )


def _steps(old: moments.Kept) -> int:
    """The number of steps that the nodes of a state agree on."""
    numbers = known([moments.counters(node, moments.STEPS) for node in old.nodes])
    if len(numbers) != 1:
        raise ValueError(
            "step must be given: how many steps were taken? The state has counted "
            f"{numbers or 'none'}. Schedules of the new optimizer go on from it."
        )
    return numbers[0]


def _check_same_kinds(old: moments.Kept, new: moments.Kept) -> None:
    """Checks that the old state has the moments that the new one needs, and not only others."""
    if old.has(NesterovSplitState) != new.has(NesterovSplitState):
        raise ValueError(
            "state and optimizer must both have a NesterovSplitState, or neither: as in lans, its "
            "numbers may be moments of normalised gradients, which no other optimizer keeps. Begin "
            "with optimizer.init(params)."
        )
    has, wants = ({x.what for x in kept.moments if x} for kept in (old, new))
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
                "(optax.masked, optax.partition), or convert has made it new, or of parameters "
                "that several parts of it moved. If the new one must not move it either, hide it "
                f"there too. If it must, begin it anew: forget=matching({name!r})."
            )
        if has.what != wants.what and (has.what, wants.what) != (moments.ADAM, moments.MUON):
            raise ValueError(
                f"state has {has.what} of {name!r}, and optimizer needs {wants.what}, which is a "
                "second moment more, or something else. Let it move it as before (see matrix_mask "
                f"of muon), or begin it anew: forget=matching({name!r})."
            )
        for field, like in wants.arrays.items():
            shape = jnp.shape(has.arrays.get(field, has.first))
            if shape != jnp.shape(like):
                raise ValueError(
                    "the moments in state must have the shapes of params: "
                    f"{name!r} has {jnp.shape(like)} and its moments have {shape}. Pass the "
                    "parameters that the old optimizer moved, and from a state of pmap one replica."
                )
