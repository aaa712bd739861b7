"""Momentum preconditioned by matrices that are learned while training."""

from collections.abc import Generator
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_dtype, check_integer, check_number
from optax_largebatch.engine.blocks import NumberPerBlock
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.engine.requests import (
    Leaf,
    LeafProgram,
    Materialize,
    block_rms,
    hoist,
    materialize,
)
from optax_largebatch.engine.state import Counter, PerAxis, PerParameter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.norms import accumulation_dtype, explicit_spec, with_spec
from optax_largebatch.numerics import bias_correction, quotient, root
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.layers import Layers
from optax_largebatch.params.leaves import Layout, Leaves
from optax_largebatch.params.stacked import Stacks, check_stacked
from optax_largebatch.transforms.preconditioning.meta_gradient import meta_update, product


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


class _Scalars(NamedTuple):
    """The numbers of one step."""

    rates: tuple[Any, ...]
    b1: Any
    mu_weight: Any
    b2: Any
    nu_weight: Any
    nu_scale: Any
    eps: Any
    meta_lr_scale: Any
    max_step_scale: Any
    step_scale: Any
    learns: jax.Array
    """Whether the matrices are updated."""


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
        max_step_scale: bound on the elements of a direction, relative to their root mean square: 2
            in icefall. :math:`c`, positive.
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
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range; or, inside `jax.shard_map`, a parameter is
            split and `partition_specs` are not given.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_learned_matrices
        >>> params = jnp.ones((2, 3))
        >>> transform = scale_by_learned_matrices(0.1)
        >>> updates, state = transform.update(params, transform.init(params), params)
        >>> print(jnp.ptp(updates), [matrix.shape for matrix in state.matrices[0]])
        0.0 [(2, 2), (3, 3)]

    References:
        icefall, `optim.py` of July 2022: `LearnedGradient`, corrected (docs/algorithms/icefall.md).
    """
    rates = as_grouped("learning_rate", learning_rate)
    check_number("b1", b1, "[0, 1)")
    check_number("b2", b2, "[0, 1)")
    check_number("eps", eps, "[0, inf)")
    check_number("meta_lr_scale", meta_lr_scale, "[0, inf)")
    check_integer("period", period, at_least=1)
    check_number("max_step_scale", max_step_scale, "(0, inf)")
    check_integer("max_fullcov_size", max_fullcov_size, at_least=0)
    check_dtype("mu_dtype", mu_dtype)
    stacks = check_stacked(stacked)

    def identities(params: optax.Params) -> list[tuple[jax.Array, ...]]:
        def of_one(param: Any, axes: tuple[int, ...]) -> tuple[jax.Array, ...]:
            layers = Layers.of(jnp.shape(param), axes)
            dtype = accumulation_dtype(jnp.result_type(param))
            lengths = layers.block if _kind(layers.block) == "matrix" else ()
            one = [
                jnp.eye(n, dtype=dtype) if n <= max_fullcov_size else jnp.ones(n, dtype)
                for n in lengths
            ]
            return tuple(jnp.broadcast_to(x, (*layers.stack, *x.shape)) for x in one)

        return list(map(of_one, jax.tree.leaves(params), stacks.axes(params)))

    def zeros(params: optax.Params) -> list[tuple[jax.Array, ...]]:
        return jax.tree.map(jnp.zeros_like, identities(params))

    def scalars(state: ScaleByLearnedMatricesState) -> _Scalars:
        return _Scalars(
            rates.at(state.count),
            b1,
            1 - b1,
            b2,
            1 - b2,
            1 / bias_correction(b2, state.count + 1),
            eps,
            meta_lr_scale,
            max_step_scale,
            (1 - b1) / (1 - b1**2) ** 0.5,
            (state.count > 0) & (state.count % period == 0),
        )

    def choices(leaves: Leaves) -> list[tuple[Layers, Layout, int]]:
        who = "scale_by_learned_matrices multiplies along axes"
        layouts = [leaves.layout(index, who) for index in range(len(leaves.arrays))]
        stacked = zip(layouts, stacks.axes(leaves.tree), strict=True)
        layers = [Layers.of(layout.shape, axes) for layout, axes in stacked]
        return list(zip(layers, layouts, rates.indices(leaves.tree), strict=True))

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        step: _Scalars = at.scalars
        layers, layout, index = at.choice
        state: ScaleByLearnedMatricesState = at.state
        mu = yield materialize(step.b1 * state.mu + step.mu_weight * update, mu_dtype)
        kind = _kind(layers.block)
        if kind == "small":
            (rms,) = yield block_rms(update)
            nu = step.b2 * state.nu + step.nu_weight * jnp.square(rms)
            nu, length = yield hoist(nu, root(nu * step.nu_scale) + step.eps)
            return quotient(mu, length), state._replace(mu=mu, nu=nu)
        direction, matrices, covariances = mu, (), ()
        if kind == "matrix":
            rate = step.rates[index] * step.meta_lr_scale
            learned = functools.partial(meta_update, rate=rate, decay=step.b2)
            old = state.matrices, state.covariances

            # A product along an axis needs all of it, so every device works on the whole.
            def whole(x: jax.Array) -> jax.Array:
                return layers.first(layout.gathered(x))

            def new() -> Any:
                return layers.each(learned)(whole(update), whole(at.state.mu), *old)

            matrices, covariances = yield from _stored(jax.lax.cond(step.learns, new, lambda: old))
            momentum = whole(mu)
            direction = layout.local_shard(layers.back(layers.each(product)(matrices, momentum)))
            direction = yield materialize(with_spec(direction, explicit_spec(mu)))
        (rms,) = yield block_rms(direction)
        rms = rms + 1e-30  # a direction of zero stays zero
        limit = step.max_step_scale * rms
        clipped = step.step_scale * jnp.clip(direction, -limit, limit) / rms
        return clipped, state._replace(mu=mu, matrices=matrices, covariances=covariances)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(
                ScaleByLearnedMatricesState,
                count=Counter(),
                mu=PerParameter(mu_dtype),
                nu=NumberPerBlock(),
                matrices=PerAxis(identities),
                covariances=PerAxis(zeros),
            ),
            scalars=scalars,
            choices=choices,
            stacked=stacks,
            given="shards",
            facts=of_all({"direction": "learned matrices"}),
        )
    )


def _kind(block: tuple[int, ...]) -> Literal["small", "plain", "matrix"]:
    """The treatment of a block of this shape, axes of length 1 left out."""
    if math.prod(block) <= 5:
        return "small"
    return "plain" if len(block) == 1 else "matrix"


def _stored(tree: Any) -> Generator[Materialize, Any, Any]:
    """The part of a leaf program that stores all arrays of a tree."""
    arrays, structure = jax.tree.flatten(tree)
    stored = []
    for array in arrays:
        stored.append((yield materialize(array)))
    return structure.unflatten(stored)
