"""Momentum preconditioned by matrices that are learned while training."""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_dtypes, check_integer, check_numbers
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.norms import (
    accumulation_dtype,
    explicit_spec,
    other_axes,
    sum_of_squares,
    with_spec,
)
from optax_largebatch.numerics import bias_correction, quotient, root
from optax_largebatch.params.blocks import Layers
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import LeafSharding, Leaves
from optax_largebatch.params.shapes import Axes, Shape
from optax_largebatch.params.stacked import Stacks, check_stacked

Matrices = tuple[jax.Array, ...]
"""A matrix, or the vector of its diagonal, for each axis of a block."""


class ScaleByLearnedMatricesState(NamedTuple):
    """State of `scale_by_learned_matrices`."""

    count: jax.Array
    """Steps taken, shape ()."""
    mu: optax.Updates
    """First moments, like the parameters."""
    nu: jax.Array
    """The second moment of each block of five elements or fewer, in the order of `jax.tree.leaves`;
    unused in others."""
    matrices: Any
    """For each parameter, in the order of `jax.tree.leaves`, a tuple with the matrix of each axis
    of a block, or the vector of its diagonal; stacked layers stand on leading axes. The tuple is
    empty where blocks have no matrix."""
    covariances: Any
    """The second moments of the gradient across each axis, laid out like `matrices`."""


def scale_by_learned_matrices(
    learning_rate: Hyperparameter,
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.98,
    eps: Scalar = 1e-8,
    meta_lr_scale: Scalar = 1.0,
    period: int = 10,
    max_step_scale: Scalar = 2.0,
    max_fullcov_size: int = 1024,
    stacked: Stacks = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Applies a learned matrix to each axis of the momentum; experimental.

    .. math::

        m_t &= b_1 m_{t-1} + (1 - b_1) g_t, \qquad d_t = (\times)_k L_k m_t, \qquad
        \rho = \operatorname{rms}(d_t) \\
        u_t &= \frac{1 - b_1}{\sqrt{1 - b_1^2}} \,
            \frac{\min(\max(d_t, -c \rho), c \rho)}{\rho}

    :math:`L_k` is symmetric and positive definite with a mean diagonal of 1, the identity at
    first. After every `period` steps it takes a step of relative size :math:`\eta\,\mu` to increase

    .. math::

        f(L) = \frac{\langle g_t, d \rangle}{\sqrt{\operatorname{mean}(d \cdot (\times)_k \hat C_k
        d)}}, \qquad d = (\times)_k L_k m_{t-1}, \qquad C_k \leftarrow b_2 C_k + G_k G_k^\top

    with :math:`G_k` the gradient unfolded along axis :math:`k` and :math:`\hat C_k` that matrix
    with a mean diagonal of 1.

    Axes of size 1 do not count. Blocks of one axis have no matrix, so :math:`d = m`. Blocks of five
    elements or fewer take :math:`u = m / (\sqrt{v / (1 - b_2^t)} + \epsilon)` with a running mean
    :math:`v` of :math:`\operatorname{mean}(g^2)`.

    Args:
        learning_rate: :math:`\eta`, the rate of the whole optimizer; a float, a schedule, or what
            `ParamGroups.per_group` returns. Here it moves only the matrices.
        b1: decay rate of the first moment: usually 0.9. In [0, 1).
        b2: decay rate of the second moments for one step (of :math:`C` for one update): 0.98 in
            icefall. In [0, 1).
        eps: keeps the division finite: 1e-8 in icefall. :math:`\epsilon`, 0 or more.
        meta_lr_scale: :math:`\mu`, 0 or more; 0 leaves the matrices the identity. At
            :math:`\eta\,\mu \ge 1` a single step could make a matrix singular.
        period: how many steps are between two updates of the matrices, which cost the most: 10 in
            icefall. 1 or more.
        max_step_scale: the largest element of a direction, over its root mean square: 2 in icefall.
            :math:`c`, positive.
        max_fullcov_size: the longest axis with a full matrix, whose cost grows with its cube; a
            longer one has a diagonal. 0 or more.
        stacked: the parameters that stack layers, so that each layer has matrices of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        A transformation; its state is a `ScaleByLearnedMatricesState`. Inside `jax.shard_map` a
        parameter that is split needs `partition_specs`. Its momentum is gathered in each step, and
        where the matrices learn, its gradient too.

    Raises:
        ValueError: inside `jax.shard_map`, a parameter is
            split and `partition_specs` are not given.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch.transforms.learned_matrices import scale_by_learned_matrices
        >>> params = jnp.ones((2, 3))
        >>> transform = scale_by_learned_matrices(0.1)
        >>> updates, state = transform.update(params, transform.init(params), params)
        >>> print(jnp.ptp(updates), [matrix.shape for matrix in state.matrices[0]])
        0.0 [(2, 2), (3, 3)]

    References:
        icefall, `optim.py` of July 2022: `LearnedGradient`, with its `max_step_scale`, corrected
        (docs/algorithms/icefall.md).
    """
    rates = as_grouped("learning_rate", learning_rate)
    check_numbers("[0, 1)", b1=b1, b2=b2)
    check_numbers("[0, inf)", eps=eps, meta_lr_scale=meta_lr_scale)
    check_integer("period", period, at_least=1)
    check_numbers("(0, inf)", max_step_scale=max_step_scale)
    check_integer("max_fullcov_size", max_fullcov_size, at_least=0)
    check_dtypes(mu_dtype=mu_dtype)
    stacks = check_stacked(stacked, segments=False)

    def of_param(param: Any, axes: Axes) -> Matrices:
        layers = Layers.of(jnp.shape(param), axes)
        if _is_small(layers.block) or len(layers.block) == 1:
            return ()
        dtype = accumulation_dtype(jnp.result_type(param))
        matrices = []
        for n in layers.block:
            identity = jnp.eye(n, dtype=dtype) if n <= max_fullcov_size else jnp.ones(n, dtype)
            matrices.append(jnp.broadcast_to(identity, (*layers.stack, *identity.shape)))
        return tuple(matrices)

    def identities(params: optax.Params) -> list[Matrices]:
        return list(map(of_param, jax.tree.leaves(params), stacks.axes(params)))

    def scalars(state: ScaleByLearnedMatricesState) -> tuple[Any, ...]:
        meta_rates = tuple(rate * meta_lr_scale for rate in rates.at(state.count))
        learns = (state.count > 0) & (state.count % period == 0)
        correction = bias_correction(b2, state.count + 1)
        return b1, b2, eps, correction, max_step_scale, meta_rates, learns

    def choices(leaves: Leaves) -> list[tuple[Layers, LeafSharding, int]]:
        shardings = leaves.shardings("scale_by_learned_matrices multiplies along axes")
        shapes = [sharding.shape for sharding in shardings]
        layers = map(Layers.of, shapes, stacks.axes(leaves.tree))
        return list(zip(layers, shardings, rates.indices(leaves.tree), strict=True))

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        b1, b2, eps, correction, largest, meta_rates, learns = at.scalars
        layers, sharding, index = at.choice
        state: ScaleByLearnedMatricesState = at.state
        mu = yield engine.materialize(b1 * state.mu + (1 - b1) * update, mu_dtype)
        if _is_small(layers.block):
            (rms,) = yield engine.block_rms(update)
            nu = b2 * state.nu + (1 - b2) * jnp.square(rms)
            nu, length = yield engine.hoist(nu, root(nu * (1 / correction)) + eps)
            return quotient(mu, length), state._replace(mu=mu, nu=nu)
        direction = mu
        state = state._replace(mu=mu)
        if state.matrices:
            learned = functools.partial(meta_update, rate=meta_rates[index], decay=b2)
            old = state.matrices, state.covariances

            # A product along an axis needs all of it, so every device works on the whole.
            def whole(x: jax.Array) -> jax.Array:
                return layers.first(sharding.gathered(x))

            def new() -> Any:
                return layers.each(learned)(whole(update), whole(at.state.mu), *old)

            arrays, structure = jax.tree.flatten(jax.lax.cond(learns, new, lambda: old))
            for k, array in enumerate(arrays):
                arrays[k] = yield engine.materialize(array)
            matrices, covariances = structure.unflatten(arrays)
            state = state._replace(matrices=matrices, covariances=covariances)
            products = layers.each(product)(matrices, whole(mu))
            direction = sharding.local_shard(layers.back(products))
            direction = with_spec(direction, explicit_spec(mu))
            direction = yield engine.materialize(direction)
        (rms,) = yield engine.block_rms(direction)
        rms = rms + 1e-30  # a direction of zero stays zero
        limit = largest * rms
        weight = (1 - b1) / (1 - b1**2) ** 0.5
        clipped = weight * jnp.clip(direction, -limit, limit) / rms
        return clipped, state

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByLearnedMatricesState,
            count=engine.Counter(),
            mu=engine.PerParameter(mu_dtype),
            nu=engine.NumberPerBlock(),
            matrices=engine.PerAxis(identities),
            covariances=engine.PerAxis(
                lambda params: jax.tree.map(jnp.zeros_like, identities(params))
            ),
        ),
        scalars=scalars,
        choices=choices,
        stacked=stacks,
        given="shards",
        facts=of_all({"direction": "learned matrices"}),
    )


def _is_small(block: Shape) -> bool:
    """Whether a block of this shape has so few elements that they share a second moment."""
    return math.prod(block) <= 5


# How the matrices of one block learn. The matrices L_k of its axes, or the vectors of their
# diagonals, turn a momentum m into a direction d. d is good if the next gradient h points along d:
# f(L) = <h, d> / rho, rho^2 = mean(d * C d), with C_k the second moments of the gradient's slices
# across axis k. f does not depend on the size of L_k, so its gradient is orthogonal to L_k.


def product(
    matrices: Sequence[jax.Array],
    x: jax.Array,
    without: int | None = None,
) -> jax.Array:
    """`x` with the matrix of each axis applied along it, except the axis `without`."""
    for axis, matrix in enumerate(matrices):
        if axis == without:
            continue
        if matrix.ndim == 1:
            x = x * jnp.expand_dims(matrix, other_axes(x.ndim, [axis]))
        else:
            applied = jnp.tensordot(matrix, x, axes=(1, axis), precision="highest")
            x = jnp.moveaxis(applied, 0, axis)
    return x


def slice_products(
    a: jax.Array,
    b: jax.Array,
    axis: int,
    like: jax.Array,
) -> jax.Array:
    """The inner products of the slices of `a` and `b` across an axis, or only the diagonal."""
    others = other_axes(a.ndim, [axis])
    if like.ndim == 1:
        return jnp.sum(a * b, axis=others)
    return jnp.tensordot(a, b, axes=(others, others), precision="highest")


def mean_diagonal(matrix: jax.Array) -> jax.Array:
    """The mean of the diagonal."""
    return jnp.mean(matrix if matrix.ndim == 1 else jnp.diagonal(matrix))


def meta_gradient(
    gradient: jax.Array,
    momentum: jax.Array,
    matrices: Matrices,
    covariances: Matrices,
) -> tuple[Matrices, jax.Array]:
    """The gradient of `f` with respect to each of the matrices, and whether `f` is defined."""
    direction = product(matrices, momentum)
    scaled = [quotient(matrix, mean_diagonal(matrix)) for matrix in covariances]
    weighted = product(scaled, direction)
    rho_squared = jnp.mean(weighted * direction)
    defined = rho_squared > 0
    rho_squared = jnp.where(defined, rho_squared, 1)
    rho = root(rho_squared)
    value = jnp.sum(gradient * direction) / rho
    outer = gradient / rho - value / (gradient.size * rho_squared) * weighted
    slopes = (
        slice_products(outer, product(matrices, momentum, without=axis), axis, matrix)
        for axis, matrix in enumerate(matrices)
    )
    return tuple(slopes), defined


def ascended(matrix: jax.Array, slope: jax.Array, rate: Any) -> jax.Array:
    """The matrix after a step along its meta-gradient; symmetric, positive, mean diagonal 1.

    The step has the size `rate` relative to the matrix.
    """
    if matrix.ndim == 1:
        along = slope * matrix
    else:
        along = jnp.matmul((slope + slope.T) / 2, matrix, precision="highest")
    step = rate * quotient(along, root(sum_of_squares(along)))
    if matrix.ndim == 1:
        new = matrix * jnp.square(1 + step)
        return new / jnp.mean(new)
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    factor = identity + step
    new = jnp.matmul(factor, matrix, precision="highest")
    new = jnp.matmul(new, factor.T, precision="highest")
    new = (new + new.T) / (2 * mean_diagonal(new))
    # As large as the rounding errors, which could make the smallest eigenvalues negative.
    ridge = 4 * len(matrix) * float(jnp.finfo(matrix.dtype).eps)
    return (new + ridge * identity) / (1 + ridge)


def meta_update(
    gradient: jax.Array,
    momentum: jax.Array,
    matrices: Matrices,
    covariances: Matrices,
    rate: Any,
    decay: Any,
) -> tuple[Matrices, Matrices]:
    """The matrices and the second moments of slices after one update.

    Args:
        gradient: the gradient of a block.
        momentum: the momentum of the step before.
        matrices: the matrices of the axes.
        covariances: the second moments of the axes.
        rate: the relative size of the step.
        decay: decay rate of the second moments.

    Returns:
        The new matrices and second moments.
    """
    covariances = tuple(
        decay * matrix + slice_products(gradient, gradient, axis, matrix)
        for axis, matrix in enumerate(covariances)
    )
    # Neither size matters to a step of relative size, and products of their squares would overflow.
    direction = quotient(gradient, jnp.max(jnp.abs(gradient)))
    mean_direction = quotient(momentum, jnp.max(jnp.abs(momentum)))
    slopes, defined = meta_gradient(direction, mean_direction, matrices, covariances)
    learned = tuple(
        jnp.where(defined, ascended(matrix, slope, rate), matrix)
        for matrix, slope in zip(matrices, slopes, strict=True)
    )
    return learned, covariances
