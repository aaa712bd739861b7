"""The optimizer of a plan, for some parameters."""

from collections.abc import Callable
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_optional_number
from optax_largebatch.optimizers.adamh import adamh
from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import lars
from optax_largebatch.optimizers.muon import muon
from optax_largebatch.optimizers.muonh import muonh
from optax_largebatch.params.ends import End, between_ends
from optax_largebatch.params.masks import Mask, resolve_mask
from optax_largebatch.params.rules import VECTORS
from optax_largebatch.params.stacked import Stacks, check_stacked
from optax_largebatch.plans.law import SPHERES
from optax_largebatch.plans.plan import BatchPlan
from optax_largebatch.plans.tuned_run import FAMILIES, TunedRun
from optax_largebatch.transforms.adam import scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.clipping import clip_by_global_norm
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.wrappers.accumulation import accumulate_gradients

LAYERWISE = {"lamb": lamb, "lans": lans, "lars": lars}
BETWEEN_ENDS: dict[str, Callable[..., Any]] = {"muon": muon, "muonh": muonh, "adamh": adamh}
"""The optimizers of what is neither an embedding nor the last layer."""


def planned_optimizer(
    plan: BatchPlan,
    params: Any,
    *,
    stacked: Stacks = None,
    embeddings: End = "by name",
    head: End = "by name",
    not_decayed: Mask = None,
    optimizer: Callable[..., optax.GradientTransformation] | None = None,
    max_grad_norm: Scalar | None = None,
    **arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""The optimizer that a plan is for, with its schedules.

    Print `explain(optimizer, params)` to see what moves each parameter. Muon, MuonH and AdamH move
    the matrices of the layers; Adam moves the embeddings, the last layer and vectors, at 3/13 of
    the rate of MuonH and AdamH. Beside Muon it has Muon's rate, whose steps are as long as Adam's
    (`consistent_rms=0.2`). Gradients are accumulated if the plan has a `micro_batch_size`.

    Args:
        plan: a plan with a `run`, from `batch_plan`.
        params: the parameters, or their shapes from `jax.eval_shape`.
        stacked: the parameters that stack layers, see `stacked_layers`; None if there are none.
        embeddings: for Muon, MuonH and AdamH, the embeddings: a rule, or None if there are none. By
            name, those with "embed", `wte` and the like; it is an error if none has such a name and
            some matrix may be one.
        head: for these three, the last layer, in the same form. By name, "head", "logits",
            "classifier" and the like, and what is as long as a table of words.
        not_decayed: the parameters without weight decay and trust ratio; None for biases, the
            scales of norms and all else that has one axis, see `matching_kinds`.
        optimizer: for a plan of your own optimizer, the function that makes it: of `learning_rate`,
            of `weight_decay` if the run has one, and of the numbers of the run by their names.
            All may be schedules. It has its own masks and stacks: the arguments before are not
            for it.
        max_grad_norm: the largest global norm of the gradient, of the whole batch if gradients are
            accumulated: 1.0 in most trainers; None for no clipping.
        **arguments: any other argument of the optimizer, such as `ns_dtype`, `matrix_axes` or
            `others`; it takes the place of what is chosen here. For AdamW those of `scale_by_adam`,
            such as `nesterov`; for SGD those of `accumulate_momentum`.

    Returns:
        The optimizer. Its `update` needs the parameters.

    Raises:
        ValueError: the plan has no run, its weight decay is of a kind that the optimizer does not
            have, a rule or a name selects no parameter, or the optimizer cannot move these
            parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import TunedRun, batch_plan, explain, planned_optimizer
        >>> params = {"embed": jnp.ones((8, 4)), "mlp": {"kernel": jnp.ones((4, 4)),
        ...           "bias": jnp.ones(4)}, "head": jnp.ones((4, 8))}
        >>> run = TunedRun(
        ...     "adamw", batch_size=512, total="1M", learning_rate=1e-3, weight_decay=0.1)
        >>> plan = batch_plan(4096, total="1M", run=run.to("muonh"))
        >>> print(explain(planned_optimizer(plan, params), params))
        parameter   shape  blocks    direction  length  decay  rate   state
        embed       8x4    1         adam       -       -      0.231  8 B
        head        4x8    1         adam       -       -      0.231  8 B
        mlp/bias    4      1         adam       -       -      0.231  8 B
        mlp/kernel  4x4    1 of 4x4  muon       sphere  -      1      4 B
        4 parameters, 84 numbers (adam: 68; muon, sphere: 16)
        668 bytes of state on a device
    """
    if not isinstance(plan, BatchPlan):
        raise TypeError(f"plan must be a BatchPlan, got {plan!r} of type {type(plan).__name__}.")
    if plan.run is None:
        raise ValueError("plan must have a run: give batch_plan a TunedRun, got a plan without.")
    check_optional_number("max_grad_norm", max_grad_norm)
    family = plan.run.optimizer
    if (optimizer is None) == (family not in FAMILIES):
        raise ValueError(
            f"optimizer must be a function for a run of your own optimizer, and None for others; "
            f"got {optimizer!r} for {family!r}."
        )
    blocks = check_stacked(stacked).blocks(params)
    _check_decay(plan.run)
    decayed: Mask = ~VECTORS
    if not_decayed is not None:
        flags = resolve_mask("not_decayed", not_decayed, blocks)
        decayed = jax.tree.structure(params).unflatten([not flag for flag in flags])
    numbers = {name: _number(plan, name) for name in plan.run.numbers}
    rate = plan.learning_rate
    decay = plan.weight_decay if plan.run.weight_decay != 0 else 0.0

    def adamw(**settings: Any) -> optax.GradientTransformationExtraArgs:
        return chain(
            scale_by_adam(**settings),
            add_decayed_weights(decay, decayed, stacked=stacked),
            scale_by_learning_rate(rate),
        )

    if optimizer is not None:
        named: dict[str, Any] = numbers | ({"weight_decay": decay} if callable(decay) else {})
        made = _built(optimizer, learning_rate=rate, **(named | arguments))
    elif family == "adamw":
        made = adamw(**(numbers | arguments))
    elif family == "sgd":
        made = chain(
            add_decayed_weights(decay, decayed, stacked=stacked),
            _built(accumulate_momentum, **(numbers | arguments)),
            scale_by_learning_rate(rate),
        )
    elif family in LAYERWISE:
        masks = {"weight_decay_mask": decayed, "trust_ratio_mask": decayed, "stacked": stacked}
        named = numbers | masks | {"weight_decay": decay}
        made = _built(LAYERWISE[family], learning_rate=rate, **(named | arguments))
    else:
        layers = between_ends(embeddings, head)
        layers.mask(blocks)  # its errors
        if family == "adamh":
            named = numbers | {"adamh_mask": layers & ~VECTORS}
        else:
            named = {"matrix_mask": layers, "beta": numbers.pop("momentum")}
            if family == "muon":
                others = adamw(**numbers)
                named |= {"weight_decay": decay, "consistent_rms": 0.2, "others": others}
            else:
                named |= {"adam_eps": numbers.pop("eps")} | numbers
        made = BETWEEN_ENDS[family](rate, **(named | {"stacked": stacked} | arguments))
    if max_grad_norm is not None:
        made = chain(clip_by_global_norm(max_grad_norm), made)
    if plan.micro_batch_size is not None:
        made = accumulate_gradients(made, every=plan.micro_batches)
    jax.eval_shape(made.init, params)
    return made


def _check_decay(run: TunedRun) -> None:
    """Another kind of decay would be built as the usual one, many times too strong or too weak."""
    family = run.optimizer
    if run.weight_decay == 0 or family not in FAMILIES:
        return
    if family in SPHERES:
        raise ValueError(f"weight_decay must be 0 for {family!r}, whose matrices keep their norms.")
    usual = FAMILIES[family][0]
    if run.kind == "l2" and family in LAYERWISE:  # it moves as a rescaled one
        return
    if run.kind != usual:
        raise ValueError(
            f"decay_kind must be {usual!r} for planned_optimizer with {family!r}, got "
            f"{run.kind!r}. (An independent decay over the peak of the rate is a decoupled one.) "
            "Or build the optimizer yourself from the schedules of the plan."
        )


def _number(plan: BatchPlan, name: str) -> Any:
    """A momentum, as a schedule if it moves during the run; or epsilon."""
    values = {plan.moved(stage.batch_size)[name].value for stage in plan.stages}
    if name == "eps":
        return plan.eps
    return values.pop() if len(values) == 1 else getattr(plan, name)


def _built(
    make: Callable[..., Any],
    **arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """What `make` returns, whose `momentum` may be a schedule here and has to be a number there."""
    if callable(arguments.get("momentum")):
        others = inspect.signature(make).parameters.keys() - {"momentum"}
        make = optax.inject_hyperparams(make, others, hyperparam_dtype=jnp.result_type(float))
    return make(**arguments)
