"""The size of single parameters, as a product of one factor for each axis."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_numbers
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.norms import (
    accumulation_dtype,
    is_on_a_mesh,
    lengths_along,
    other_axes,
    shape_of_blocks,
    sum_of_squares,
)
from optax_largebatch.numerics import root
from optax_largebatch.params.leaves import LeafSharding, Leaves
from optax_largebatch.params.shapes import Axes, Shape
from optax_largebatch.params.stacked import Stacks, check_stacked


class ScaleByFactoredParameterRmsState(NamedTuple):
    """State of `scale_by_factored_parameter_rms`."""

    count: jax.Array
    """Steps taken, shape ()."""
    factors: Any
    """For each parameter, in the order of `jax.tree.leaves`, a tuple with the factors of its axes,
    shaped to broadcast (a stack has factors for each layer); an empty tuple where blocks have one
    element."""


REFIT_PERIOD = 1000
"""How many steps are between two fits of all factors from the beginning."""


def scale_by_factored_parameter_rms(
    eps: Scalar = 1e-5,
    *,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the update by an estimate of the size of each parameter.

    .. math::

        u_{ij\dots} \leftarrow R_{ij\dots} u_{ij\dots}, \qquad R_{ij\dots} = a_i b_j \cdots
        \approx \sqrt{\max(w_{ij\dots}^2, \epsilon^2)}

    with one vector for each axis, :math:`a, b, \dots`, in place of a number for each parameter. A
    step fits one of the vectors, each axis in its turn, so that the mean of
    :math:`\max(w^2, \epsilon^2) / R^2` is 1 in each slice across that axis (or, where such slices
    would have two elements or fewer, in the whole block). The first step, and every
    thousandth after it, sets all vectors to 1 and fits them in order. Blocks of one element pass
    unchanged.

    Args:
        eps: least size of a parameter, so that those that start at zero move: 1e-5 in Cain.
            :math:`\epsilon`, positive.
        stacked: the parameters that stack layers, so that each layer has vectors of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ScaleByFactoredParameterRmsState`.
        Inside `jax.shard_map` a parameter that is split needs `partition_specs`. Only the sums
        along its axes are sent, those of all parameters together: one vector for their first axes,
        one for their second, and so on.

    Raises:
        ValueError: inside `jax.shard_map`, a parameter is
            split and `partition_specs` are not given.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_factored_parameter_rms
        >>> params = jnp.outer(jnp.array([1.0, 10.0, 100.0]), jnp.array([1.0, 2.0, -4.0]))
        >>> transform = scale_by_factored_parameter_rms()
        >>> updates, state = transform.update(jnp.ones((3, 3)), transform.init(params), params)
        >>> print(updates.round(2))
        [[  1.   2.   4.]
         [ 10.  20.  40.]
         [100. 200. 400.]]

    References:
        icefall, `optim.py` of July 2022: `Cain`.
    """
    check_numbers("(0, inf)", eps=eps)
    stacks = check_stacked(stacked, segments=False)

    def ones(params: optax.Params) -> list[tuple[jax.Array, ...]]:
        def of_param(param: Any, stacked: Axes) -> tuple[jax.Array, ...]:
            shape = jnp.shape(param)
            dtype = accumulation_dtype(jnp.result_type(param))
            return tuple(
                jnp.ones(shape_of_blocks(shape, (*stacked, axis)), dtype)
                for axis in fitted_axes(shape, stacked)
            )

        return list(map(of_param, jax.tree.leaves(params), stacks.axes(params)))

    def choices(leaves: Leaves) -> list[tuple[Axes, LeafSharding]]:
        """The stacked axes of each leaf, and how it is split."""
        shardings = leaves.shardings("scale_by_factored_parameter_rms takes means along axes")
        return list(zip(stacks.axes(leaves.tree), shardings, strict=True))

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        factors = at.state.factors
        if not factors:
            return update, at.state
        count, eps = at.scalars
        stacked, sharding = at.choice
        axes = fitted_axes(sharding.shape, stacked)
        size = math.prod(lengths_along(sharding.shape, axes))
        refits = count % REFIT_PERIOD == 0
        factors = [jnp.where(refits, 1, factor) for factor in factors]
        for position, axis in enumerate(axes):
            fits = refits | (count % len(axes) == position)
            length = sharding.shape[axis]
            kept = stacked
            elements = size
            if size > 2 * length:  # a mean for each slice
                kept = tuple(sorted((*stacked, axis)))
                elements = size // length
            here = list(map(sharding.local_shard, factors))
            squares = functools.partial(_squares, at.param, eps, here, kept)
            of_device = _zeros_unless(fits, squares, is_on_a_mesh((at.param, here)))
            (whole,) = yield engine.sums_over_devices(sharding.placed(of_device, kept))
            rms = root(whole / elements)
            factor = factors[position]
            factors[position] = jnp.where(fits, factor * rms, factor)
        estimate = product([*map(sharding.local_shard, factors)])
        return estimate * update, at.state._replace(factors=tuple(factors))

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByFactoredParameterRmsState, count=engine.Counter(), factors=engine.PerAxis(ones)
        ),
        scalars=lambda state: (state.count, eps),
        choices=choices,
        needs_params=True,
        given="shards",
        facts=of_all({"length": "size"}),
    )


def fitted_axes(shape: Shape, stacked: Axes) -> Axes:
    """The axes that have a factor: those of a block, if it has more than one element."""
    axes = other_axes(len(shape), stacked)
    return axes if math.prod(lengths_along(shape, axes)) > 1 else ()


def product(factors: Sequence[jax.Array]) -> jax.Array:
    """The estimated size of each element: the product of the factors."""
    return functools.reduce(jnp.multiply, factors)


def _squares(
    param: jax.Array,
    eps: Any,
    factors: Sequence[jax.Array],
    kept: Axes,
) -> jax.Array:
    """The sums of the squares of sizes over estimated sizes."""
    return sum_of_squares(jnp.maximum(jnp.abs(param), eps) / product(factors), kept)


def _zeros_unless(
    needed: jax.Array,
    function: Callable[[], jax.Array],
    on_a_mesh: bool,
) -> jax.Array:
    """The result of a function if it is needed, otherwise zeros.

    One CPU saves itself the work. Elsewhere the function is called in either case: a choice at run
    time makes a GPU wait for its host, and keeps sums from travelling together.
    """

    def chosen() -> jax.Array:
        return jax.lax.cond(needed, function, lambda: jnp.zeros(kind.shape, kind.dtype))

    def masked() -> jax.Array:
        return jnp.where(needed, function(), 0)

    if on_a_mesh:
        return masked()
    kind = jax.eval_shape(function)
    return jax.lax.platform_dependent(cpu=chosen, default=masked)
