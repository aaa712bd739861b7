"""The metrics of a step for a training loop to log, as one flat dictionary of scalars."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.diagnostics.noise_scale import noise_scale_or_0
from optax_largebatch.diagnostics.optimizer_facts import LAYER_WISE, Optimizer
from optax_largebatch.params.leaves import leaves_of
from optax_largebatch.params.owners import (
    Keys,
    Kind,
    check_one_model,
    labels,
    nodes_of_kinds,
    unboxed,
)
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.noise.noise_scale import MeasureNoiseScaleState
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState
from optax_largebatch.wrappers.bad_steps import SkipBadStepsState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState

SCALARS = {
    "skipped_steps": {
        SkipBadStepsState: "skipped",
        DynamicLossScaleState: "skipped",
        optax.ApplyIfFiniteState: "total_notfinite",
    },
    "loss_scale": {DynamicLossScaleState: "loss_scale"},
    "micro_step": {AccumulateGradientsState: "micro_step", optax.MultiStepsState: "mini_step"},
    "macro_step": {AccumulateGradientsState: "macro_step", optax.MultiStepsState: "gradient_step"},
}
"""The metrics that are fields of a state, with their places."""

INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def step_metrics(
    state: Any,
    params: Any = None,
    *,
    gradients: Any = None,
    updates: Any = None,
) -> dict[str, jax.Array]:
    r"""The metrics of a step for a training loop to log: scalars in a flat dictionary.

    Call it in a compiled step, also inside `jax.shard_map`, or between steps. It reads the state,
    however it is wrapped, and takes the norms of the trees that it is given.

    ================================ ==============================================================
    `learning_rate`                  learning rate of the last step; the largest, if parts of the
                                     optimizer or groups of parameters have their own
    `gradient_norm`, `update_norm`,  L2 norms of all of `gradients`, `updates` and `params`, as far
    `param_norm`                     as they are given
    `trust_ratio/min`, `.../median`, trust ratios of the last step, over all layers. Ratios of
    `.../max`                        exactly 1 do not count: these layers are not adapted. All three
                                     are 1 if no layer is adapted, and NaN if one ratio is
    `angle/min`, `.../median`,       angles of the last step in radians, over all layers that stay
    `.../max`                        on a sphere (`hyperball`) and have moved
    `skipped_steps`                  steps left out: a gradient was not finite, or a spike
    `loss_scale`                     the factor for the next loss
    `micro_step`, `macro_step`       micro-batches in the accumulator, and steps taken so far
    `noise_scale`                    the gradient noise scale, where it is measured; 0 before that
    ================================ ==============================================================

    Metrics that a state does not have are left out, so the names are the same from the first step
    to the last. Where a state has several of a kind, as behind `optax.partition`, the key in which
    their places differ follows the name: `learning_rate/embedding`. `learning_rate` is there, too.

    The learning rate is known for this library's optimizers and for `optax.inject_hyperparams`;
    other optimizers do not keep it in their state.

    Args:
        state: the optimizer's state after the step.
        params: the parameters; None for no norm.
        gradients: the gradients of the step; None for no norm.
        updates: the updates from the optimizer; None for no norm.

    Returns:
        Scalars by name.

    Raises:
        TypeError: the first argument is an optimizer.
        ValueError: the state is that of many models, of `jax.vmap` or `jax.pmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import lamb, skip_bad_steps, step_metrics
        >>> params = {"bias": jnp.zeros(1), "kernel": jnp.array([3.0, 4.0])}
        >>> optimizer = skip_bad_steps(lamb(optax.linear_schedule(0.1, 0.0, 10)))
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> for name, value in step_metrics(state, params, updates=updates).items():
        ...     print(name, round(float(value), 2))
        learning_rate 0.1
        update_norm 0.5
        param_norm 5.0
        trust_ratio/min 3.54
        trust_ratio/median 3.54
        trust_ratio/max 3.54
        skipped_steps 0.0
    """
    if isinstance(state, Optimizer):
        raise TypeError(
            "state must be the state of an optimizer, as its `update` returns it; got the "
            "optimizer. Call step_metrics(state, params)."
        )
    trees = {"gradient_norm": gradients, "update_norm": updates, "param_norm": params}
    return {
        **_learning_rates(state),
        **{name: _norm(name, tree) for name, tree in trees.items() if tree is not None},
        **_spread(state, "trust_ratio", "trust_ratios", *LAYER_WISE, not_adapted=1),
        **_spread(state, "angle", "angles", HyperballState, not_adapted=0),
        **_scalars(state),
        **_noise_scales(state),
    }


def _learning_rates(state: Any) -> dict[str, jax.Array]:
    """The learning rates in the nodes of a state.

    The largest of all comes first, under the same name whatever the optimizer.
    """
    ours = nodes_of_kinds(state, ScaleByLearningRateState, HyperballState)
    rates = {
        node.keys: check_one_model("learning_rates", node.array("learning_rates"), ndim=1)
        for node in ours
    }
    for node in nodes_of_kinds(state, *INJECTED):
        rate = node.fields["hyperparams"].get("learning_rate")
        if rate is not None and not any(keys[: len(node.keys)] == node.keys for keys in rates):
            rates[node.keys] = jnp.asarray(unboxed(rate))
    places = sorted(rates)
    metrics = {
        name: jnp.max(rates[keys])
        for name, keys in zip(_named("learning_rate", places), places, strict=True)
        if rates[keys].size  # otherwise there are no parameters for this node
    }
    if not metrics:
        return {}
    dtype = norms.accumulation_dtype(*(x.dtype for x in metrics.values()))
    largest = jnp.max(jnp.stack([x.astype(dtype) for x in metrics.values()]))
    return {"learning_rate": largest} | metrics


def _norm(name: str, tree: Any) -> jax.Array:
    """The L2 norm of a tree, the same on all devices that share it."""
    leaves = leaves_of(name.removesuffix("_norm"), tree)
    return norms.from_sum_of_squares(leaves.sum_of_squares(leaves.arrays))


def _spread(
    state: Any,
    name: str,
    field: str,
    *kinds: Kind,
    not_adapted: float,
) -> dict[str, jax.Array]:
    """The smallest, median and largest entry of vectors with a number for each block.

    Args:
        state: the state.
        name: the metric.
        field: the vectors.
        *kinds: the nodes that have them.
        not_adapted: the entry of a block that does not count; if none counts, all three are that.
    """
    nodes = nodes_of_kinds(state, *kinds)
    vectors = [check_one_model(field, node.array(field), ndim=1) for node in nodes]
    if not any(vector.size for vector in vectors):
        return {}
    entries = jnp.concatenate(vectors)
    adapted = entries != not_adapted
    # A NaN in the entries shows in all three. None is made here, which jax_debug_nans would report.
    counted = jnp.where(adapted, entries, jnp.inf)
    lowest = jnp.min(counted)
    middle = jnp.stack([jnp.sum(adapted) - 1, jnp.sum(adapted)]) // 2
    median = jnp.mean(jnp.sort(counted)[middle])
    ends = {
        "min": lowest,
        "median": jnp.where(jnp.isnan(lowest), lowest, median),
        "max": jnp.max(jnp.where(adapted, entries, -jnp.inf)),
    }
    return {f"{name}/{end}": jnp.where(adapted.any(), x, not_adapted) for end, x in ends.items()}


def _scalars(state: Any) -> dict[str, jax.Array]:
    """The metrics that are fields of a state."""
    metrics = {}
    for name, fields in SCALARS.items():
        nodes = nodes_of_kinds(state, *fields)
        arrays = [jnp.asarray(node.array(fields[node.kind])) for node in nodes]
        values = [check_one_model(name, array, ndim=0) for array in arrays]
        if name == "skipped_steps" and values:  # all wrappers of one optimizer count together
            metrics[name] = sum(values)
        else:
            metrics |= zip(_named(name, [node.keys for node in nodes]), values, strict=True)
    return metrics


def _noise_scales(state: Any) -> dict[str, jax.Array]:
    """The gradient noise scale of each node that measures one."""
    nodes = nodes_of_kinds(state, MeasureNoiseScaleState)
    names = _named("noise_scale", [node.keys for node in nodes])
    return {name: noise_scale_or_0(node.fields) for name, node in zip(names, nodes, strict=True)}


def _named(name: str, places: list[Keys]) -> list[str]:
    """A metric's name for each place that has it."""
    return [f"{name}/{label}" if label else name for label in labels(places)]
