"""A factor for each matrix, from its shape."""

from typing import Literal, get_args

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_choice, check_optional_number, renamed
from optax_largebatch.params.matrix_axes import MatrixAxes, check_axes
from optax_largebatch.params.stacked import Stacks

ShapeFactor = Literal["jordan", "spectral_norm", "none"]
"""The factor of a matrix where its root mean square is not given."""


@renamed("weight_dimension_numbers", "matrix_axes")
def scale_by_matrix_shape(
    consistent_rms: Scalar | None = None,
    *,
    shape_factor: ShapeFactor = "jordan",
    matrix_axes: MatrixAxes = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each matrix by a factor of its numbers of rows and columns.

    .. math::

        u \leftarrow r \sqrt{\max(n_\text{rows}, n_\text{columns})} \, u
        \quad\text{or, without } r\text{,}\quad
        u \leftarrow \sqrt{\max(1, n_\text{columns} / n_\text{rows})} \, u
        \quad\text{or}\quad
        u \leftarrow \sqrt{n_\text{columns} / n_\text{rows}} \, u

    An orthogonal matrix has a root mean square of :math:`1 / \sqrt{\max(n_\text{rows},
    n_\text{columns})}`, so the first rule gives all matrices the root mean square :math:`r`. With
    :math:`r = 0.2` that is about the root mean square of Adam's steps, so Adam's learning rates and
    decay can be used for Muon too. Rows are the inputs of a layer and columns are its outputs, so
    with the third rule a step changes outputs of root mean square 1 by at most 1 (Dion's
    "spectral_norm", NVIDIA's "unit_rms_norm").

    Args:
        consistent_rms: the root mean square of the result's elements, if the singular values are 1:
            0.2 is about that of Adam's steps. :math:`r`, positive; None for the rule that
            `shape_factor` names.
        shape_factor: what a step is multiplied by, for its shape: `"jordan"` for the second rule,
            `"spectral_norm"` for the third, as in Dion and Scion, `"none"` for 1. It does not apply
            where `consistent_rms` is given.
        matrix_axes: which axes are the rows and columns, as in `orthogonalize_momentum`.
        stacked: the parameters that stack layers, so that each layer is a matrix of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation without state.

    Raises:
        ValueError: an argument is out of its range, or a parameter is no matrix.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_matrix_shape
        >>> transform = scale_by_matrix_shape(0.2)
        >>> update = jnp.eye(4)
        >>> updates, _ = transform.update(update, transform.init(update))
        >>> print(updates[0])
        [0.4 0.  0.  0. ]

    References:
        Ahn et al., *Dion: Distributed Orthonormalized Updates*, arXiv 2504.05295, for the third.
        Liu et al., *Muon is Scalable for LLM Training*, arXiv 2502.16982, equation 4.
        Jordan et al., *Muon*, 2024, https://kellerjordan.github.io/posts/muon.
    """
    check_optional_number("consistent_rms", consistent_rms)
    check_choice("shape_factor", shape_factor, get_args(ShapeFactor))
    axes = check_axes(matrix_axes, stacked)
    # Unequal matrices have a factor for each index of an axis, and a tile has a piece of the axis.
    may_be_unequal = any(callable(x) or "+" in str(x) for x in jax.tree.leaves(matrix_axes))

    def factor(rows: int, columns: int) -> float:
        if consistent_rms is not None:
            return max(rows, columns) ** 0.5
        ratio = columns / max(rows, 1)
        squares = {"jordan": max(1.0, ratio), "spectral_norm": ratio, "none": 1.0}
        return squares[shape_factor] ** 0.5

    def leaf(
        update: jax.Array,
        at: engine.Leaf,
    ) -> tuple[jax.Array, optax.EmptyState]:
        factors = [factor(*shape) for shape in at.choice.shapes]
        return at.scalars * at.choice.spread(factors, update.dtype) * update, at.state

    return engine.transformation(
        leaf,
        scalars=lambda state: 1.0 if consistent_rms is None else consistent_rms,
        choices=lambda leaves: axes.matrices(leaves, "scale_by_matrix_shape"),
        given="shards" if may_be_unequal else "parts",
        takes_complex=True,
    )
