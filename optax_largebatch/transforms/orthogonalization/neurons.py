"""Steps that are as long for each neuron: NorMuon."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_choice, check_flags, check_numbers
from optax_largebatch.norms import accumulation_dtype, shape_of_blocks, sum_of_squares
from optax_largebatch.numerics import root
from optax_largebatch.params.leaves import Leaves, leaves_of
from optax_largebatch.params.likely_matrices import warn_of_turned
from optax_largebatch.params.likely_stacks import forgotten
from optax_largebatch.params.matrix_axes import MatrixAxes, check_axes
from optax_largebatch.params.shapes import Axes
from optax_largebatch.params.stacked import Stacks

Side = Literal["columns", "longer"]
"""What a second moment is kept for: the columns, which are the neurons of a layer, or the longer
side of a matrix."""


class NormalizeNeuronsState(NamedTuple):
    """State of `normalize_neurons`."""

    nu: Any
    """For each parameter, in the order of `jax.tree.leaves`, a tuple with the second moments of its
    neurons, shaped to broadcast."""


def normalize_neurons(
    b2: Scalar = 0.95,
    *,
    eps: Scalar = 1e-8,
    side: Side = "columns",
    eps_is_floor: bool = False,
    matrix_axes: MatrixAxes = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the step of each neuron by the root of its second moment; NorMuon's part of Muon.

    .. math::

        v_j &\leftarrow \beta_2 v_j + (1 - \beta_2) \operatorname{mean}_i u_{ij}^2, \qquad
        y_{ij} = \frac{u_{ij}}{\sqrt{v_j} + \epsilon} \\
        u &\leftarrow \frac{\lVert u \rVert}{\max(\lVert y \rVert, \epsilon)} y

    The norm of a matrix stays, and is shared among its neurons in equal parts. Put it behind
    `orthogonalize_momentum` in a chain. Only one number for each neuron is sent between devices.

    Args:
        b2: decay rate of the second moments, which start at 0: 0.95 in Dion, 0.9 in
            modded-nanogpt. :math:`\beta_2`, in [0, 1).
        eps: keeps divisions safe. :math:`\epsilon`, positive.
        side: `"columns"` has a moment for each output of a layer, as the paper and Dion;
            `"longer"` for the longer side of a matrix, as NVIDIA and modded-nanogpt.
        eps_is_floor: True divides by :math:`\sqrt{\max(v_j, \epsilon)}`, as NVIDIA and
            modded-nanogpt.
        matrix_axes: which axes are the rows and columns, as in `orthogonalize_momentum`. A text may
            cut the axis of the neurons.
        stacked: the parameters that stack layers, so that each layer is a matrix of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation; its state is a `NormalizeNeuronsState`.

    Raises:
        ValueError: an argument is out of its range, a parameter is no matrix, or a text in
            `matrix_axes` cuts another axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import normalize_neurons
        >>> transform = normalize_neurons()
        >>> update = jnp.array([[0.6, 0.8]])
        >>> updates, _ = transform.update(update, transform.init(update))
        >>> print(updates.round(2))
        [[0.71 0.71]]

    References:
        Li et al., *NorMuon: Making Muon more efficient and scalable*, arXiv 2510.05491.
    """
    check_numbers("[0, 1)", b2=b2)
    check_numbers("(0, inf)", eps=eps)
    check_choice("side", side, get_args(Side))
    check_flags(eps_is_floor=eps_is_floor)
    axes = check_axes(matrix_axes, stacked)

    def choices(leaves: Leaves) -> list[engine.Matrices]:
        of_leaves = axes.matrices(leaves, "normalize_neurons")
        if any(x.fused and {x.cut_axes} != neurons_of_each(x) for x in of_leaves):
            raise ValueError(
                f"matrix_axes must cut the axis of the neurons (side={side!r}) alone, the same for "
                f"each matrix of a parameter; got {matrix_axes!r}."
            )
        return of_leaves

    def neurons_of_each(matrices: engine.Matrices) -> set[Axes]:
        """The axes of the neurons of each matrix."""
        is_rows = {side == "longer" and rows > columns for rows, columns in matrices.shapes}
        return {matrices.rows if rows else matrices.columns for rows in is_rows}

    def kept_axes(matrices: engine.Matrices) -> Axes:
        """The axes that run over all neurons of a parameter."""
        (neurons,) = neurons_of_each(matrices)
        return tuple(sorted((*matrices.stack, *neurons)))

    def zeros(params: optax.Params) -> list[tuple[jax.Array]]:
        leaves = leaves_of("params", params)
        kept = map(kept_axes, choices(leaves))
        return [
            (jnp.zeros(shape_of_blocks(x.shape, axes), accumulation_dtype(x.dtype)),)
            for x, axes in zip(leaves.arrays, kept, strict=True)
        ]

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        b2, eps = at.scalars
        (nu,) = at.state.nu
        matrices: engine.Matrices = at.choice
        sharding = matrices.sharding
        kept = kept_axes(matrices)
        of_device = sharding.placed(sum_of_squares(update, kept), kept)
        (squares,) = yield engine.sums_over_devices(of_device)
        inputs = math.prod(sharding.shape) // max(nu.size, 1)
        nu = b2 * nu + (1 - b2) * squares / inputs
        divisor = root(jnp.maximum(nu, eps)) if eps_is_floor else root(nu) + eps
        new_squares = squares / divisor**2
        norm = root(matrices.sums_of_each(squares))
        new_norm = root(matrices.sums_of_each(new_squares))
        factors = norm / jnp.maximum(new_norm, eps) / divisor
        return sharding.local_shard(factors) * update, at.state._replace(nu=(nu,))

    def at_init(params: optax.Params) -> None:
        if side == "columns" and not forgotten(axes.stacked, params):
            warn_of_turned("normalize_neurons", axes, params)

    return engine.transformation(
        leaf,
        state=engine.declare(NormalizeNeuronsState, nu=engine.PerAxis(zeros)),
        scalars=lambda state: (b2, eps),
        choices=choices,
        given="shards",
        at_init=at_init,
        takes_complex=True,
    )
