"""Momentum with its matrices made orthogonal: the direction of Muon."""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import arguments, engine
from optax_largebatch.arguments import Scalar, renamed
from optax_largebatch.engine.recorded_states import Facts
from optax_largebatch.norms import inner_terms
from optax_largebatch.numerics import momentum_weights
from optax_largebatch.params.leaves import Leaves, leaves_of
from optax_largebatch.params.matrix_axes import MatrixAxes, check_axes
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.orthogonalization.coefficients import checked_coefficients
from optax_largebatch.transforms.orthogonalization.newton_schulz import (
    Preconditioning,
    newton_schulz,
)


class OrthogonalizeMomentumState(NamedTuple):
    """State of `orthogonalize_momentum`."""

    count: jax.Array
    """Steps taken, shape ()."""
    mu: optax.Updates
    """Running means or sums of the gradients, like the parameters."""


@renamed("weight_dimension_numbers", "matrix_axes")
def orthogonalize_momentum(
    beta: Scalar | optax.Schedule = 0.95,
    *,
    eps: Scalar = 1e-8,
    nesterov: bool = True,
    bias_correction: Literal["full", "none"] = "full",
    grad_averaging: bool = True,
    ns_coeffs: Any = "standard",
    ns_steps: int | None = None,
    ns_dtype: jax.typing.DTypeLike | None = None,
    ns_gram: bool = False,
    preconditioning: Preconditioning = "frobenius",
    eps_is_floor: bool = False,
    adaptive: bool = False,
    matrix_axes: MatrixAxes = None,
    stacked: Stacks = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces each matrix of the momentum by an approximation of its orthogonal factor.

    .. math::

        m_t &= \beta m_{t-1} + (1 - \beta) g_t, \qquad
        d_t = \frac{\beta m_t}{1 - \beta^{t+1}} + \frac{(1 - \beta) g_t}{1 - \beta^t} \\
        X_0 &= \frac{d_t}{\lVert d_t \rVert_F + \epsilon}, \qquad
        X_{k+1} = a_k X_k + \left(b_k X_k X_k^\top + c_k (X_k X_k^\top)^2\right) X_k, \qquad
        u_t = X_K

    For :math:`d_t = U \Sigma V^\top` the result is about :math:`U V^\top`: all singular values lie
    near 1 (between 0.7 and 1.2 with the standard coefficients). In float32 a matrix with a norm
    above 1.8e19 gives a step of 0, because the square of its norm is infinite. Of a complex matrix,
    :math:`\top` conjugates, and the result is about its unitary factor.

    Where a matrix is split between devices, nothing is gathered: matrices of one shape are
    exchanged, so that each device works on some of them. For that, `update` has to know how they
    are split: pass `partition_specs` as in `chain`, or build the optimizer by
    `with_partition_specs`.

    Args:
        beta: decay rate of the momentum: 0.95 in most recipes, 0.9 to 0.97 in all. :math:`\beta`,
            in [0, 1); a float or a schedule, whose number of the step the divisions take.
        eps: added to the norm that a matrix is divided by, so that tiny gradients give shorter
            steps: 1e-8 to 1e-7 in most recipes. :math:`\epsilon`, 0 or more.
        nesterov: whether a direction looks one step ahead, as in most recipes. False leaves the
            gradient out of it: :math:`d_t = m_t / (1 - \beta^t)`.
        bias_correction: `"none"` leaves out the divisions by :math:`1 - \beta^t`. They change only
            the length of :math:`d_t`, so without a large :math:`\epsilon` the numbers stay nearly
            the same.
        grad_averaging: False gives the gradient the weight 1 in :math:`m_t` and in :math:`d_t`, in
            place of :math:`1 - \beta`: momentum as a sum.
        ns_coeffs: :math:`(a_k, b_k, c_k)`: three numbers for all iterations, a sequence with three
            numbers for each, or the name of published ones: `"standard"`, `"dion"` (also called
            "quintic"), `"polar_express"`, `"polar_express_raw"` (without its safety factor, as
            optax's `"polar_express"`), `"cans"`, `"cubic"`, `"aol"` or `"deepseek_v4"`.
        ns_steps: :math:`K`, 1 or more; None for 5, or for as many as published (`"aol"` 4,
            `"deepseek_v4"` 10).
        ns_dtype: dtype of the iterations: bfloat16, as in all recipes that name one, halves their
            time on a GPU, and what devices exchange. float16 is as fast and 6 to 10 times closer to
            float32, but devices exchange float32 then. None for float32 (float64 for float64
            parameters); NVIDIA's GPUs multiply float32 in tf32, with 10 bits.
        ns_gram: True takes two iterations at once, by products of the short side, for matrices with
            one side at least twice as long as the other. They are the same iterations with 22%
            fewer multiplications if it is four times as long; in 16 bits they stay about as exact.
            Nobody has timed it on a GPU. Devices that share a matrix take the usual form.
        preconditioning: what :math:`d_t` is divided by, so that its singular values are 1 or less.
            `"frobenius"` takes :math:`\lVert d_t \rVert_F + \epsilon`, `"spectral"` the largest
            singular value, `"schatten"` the fourth root of the sum of the fourth powers of all.
            `"aol"` divides each row by the root of the sum of magnitudes in its row of
            :math:`d_t d_t^\top` (of a high matrix each column). The last two cost no product of
            matrices more, `"spectral"` a singular value decomposition.
        eps_is_floor: True divides by :math:`\max(\lVert d_t \rVert_F, \epsilon)`, in place of
            :math:`\lVert d_t \rVert_F + \epsilon`.
        adaptive: True multiplies :math:`u_t` by :math:`\langle d_t, u_t \rangle`, about the sum of
            the singular values of :math:`d_t`. The step then gets shorter with the gradient.
        matrix_axes: which axes are the rows and columns of matrices: patterns, such as
            `{"conv": ((0, 1, 2), 3)}`, a function of the parameters, or a tree or prefix of pairs
            `(rows, columns)` (also `optax.contrib.MuonDimensionNumbers`). The other axes of a
            parameter stack matrices. A parameter that is not named must have two axes. A text cuts
            axes, where a parameter has several matrices side by side: `"rows (3 columns)"` for
            queries, keys and values, `"rows (16 columns)"` for heads, `"rows (columns 2)"` for
            interleaved ones, `"rows columns=512+128+128"` for unequal ones. It has an item for each
            axis; those that stack matrices have any name, as in `"layers rows (3 columns)"`. Query,
            key and value of MaxText, scanned along axis 1, are `"rows layers heads columns"`,
            Levanter's `q_proj` in scanned layers is `"layers groups heads columns rows"`, and
            Equinox's `query_proj` with 8 heads `"(8 columns) rows"`.
        stacked: the parameters that stack layers, so that each layer is a matrix of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.
        mu_dtype: dtype in which the momentum, :math:`m_t`, is kept: bfloat16 saves two bytes for
            each parameter. None for float32 (float64 for float64 parameters).

    Returns:
        A transformation; its state is an `OrthogonalizeMomentumState`.

    Raises:
        ValueError: an argument is out of its range, a parameter is no matrix; or, inside
            `jax.shard_map`, a parameter is split and `partition_specs` are not given.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import orthogonalize_momentum
        >>> transform = orthogonalize_momentum(ns_coeffs=(1.5, -0.5, 0.0), ns_steps=12)
        >>> gradient = jnp.array([[3.0, 0.0], [0.0, -0.5]])
        >>> updates, _ = transform.update(gradient, transform.init(gradient))
        >>> print(updates.round(3) + 0.0)
        [[ 1.  0.]
         [ 0. -1.]]

    References:
        Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024,
        https://kellerjordan.github.io/posts/muon.
        Ahn et al., *Dion: Distributed Orthonormalized Updates*, arXiv 2504.05295.
        Amsel et al., *The Polar Express*, arXiv 2505.16932, for its coefficients.
        Bernstein and Newhouse, *Old Optimizer, New Norm*, arXiv 2409.20325, for `adaptive`.
        Dao AI Lab, *Gram Newton-Schulz*, https://github.com/Dao-AILab/gram-newton-schulz, for
        `ns_gram`, which begins again more often here.
        Boissin et al., *Turbo-Muon*, arXiv 2512.04632, for `"aol"`.
        Grishina et al., *Accelerating Newton-Schulz Iteration for Orthogonalization via
        Chebyshev-type Polynomials*, arXiv 2506.10935, for `"schatten"`.
    """
    arguments.check_decay_rates(beta=beta)
    arguments.check_numbers("[0, inf)", eps=eps)
    arguments.check_choice("bias_correction", bias_correction, ("full", "none"))
    arguments.check_choice("preconditioning", preconditioning, get_args(Preconditioning))
    arguments.check_flags(
        nesterov=nesterov,
        grad_averaging=grad_averaging,
        ns_gram=ns_gram,
        eps_is_floor=eps_is_floor,
        adaptive=adaptive,
    )
    arguments.check_dtypes(ns_dtype=ns_dtype, mu_dtype=mu_dtype)
    axes = check_axes(matrix_axes, stacked)
    orthogonal = functools.partial(
        newton_schulz,
        coefficients=checked_coefficients(ns_coeffs, ns_steps),
        preconditioning=preconditioning,
        eps_is_floor=eps_is_floor,
        dtype=ns_dtype,
        gram_form=ns_gram,
    )
    # Entries beyond the range of float16 are common before the division by the norm.
    sent_dtype = None if ns_dtype is not None and jnp.dtype(ns_dtype) == jnp.float16 else ns_dtype
    splits = preconditioning != "spectral"  # which decomposes whole matrices

    def choices(leaves: Leaves) -> list[engine.Matrices]:
        matrices = axes.matrices(leaves, "orthogonalize_momentum")
        if adaptive and any(of_leaf.fused for of_leaf in matrices):
            raise ValueError("adaptive must be False with matrix_axes that cut an axis, got True.")
        return matrices

    def scalars(state: OrthogonalizeMomentumState) -> tuple[Any, ...]:
        """The decay; the gradient's weight in the momentum; both weights in the direction; eps."""
        decay = arguments.decay_rate_at(state.count, "beta", beta)
        mu_weight = 1 - decay if grad_averaging else 1.0
        if bias_correction == "none":
            weights = (decay, mu_weight) if nesterov else (1.0, 0.0)
        else:
            of_mean, of_gradient = momentum_weights(decay, state.count + 1, nesterov)
            weights = of_mean, of_gradient if grad_averaging else of_gradient / (1 - decay)
        return decay, mu_weight, *weights, eps

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        beta, mu_weight, of_momentum, of_gradient, eps = at.scalars
        mu = beta * at.state.mu + mu_weight * update
        mu = yield engine.materialize(mu, mu_dtype)
        direction = of_momentum * mu
        if nesterov:
            direction = direction + of_gradient * update
        orthogonal_parts = yield engine.each_matrix(
            orthogonal, direction, at.choice, eps, dtype=sent_dtype, splits=splits
        )
        if adaptive:
            terms = inner_terms(direction, orthogonal_parts)
            (dual_norm,) = yield engine.block_sums(terms, kept=at.choice.stack)
            orthogonal_parts = dual_norm * orthogonal_parts
        return orthogonal_parts, at.state._replace(mu=mu)

    def facts(params: optax.Params) -> list[Facts]:
        return [
            {"direction": "muon", "matrices": of_leaf.counts, "by_text": of_leaf.by_text}
            for of_leaf in choices(leaves_of("params", params))
        ]

    return engine.transformation(
        leaf,
        state=engine.declare(
            OrthogonalizeMomentumState, count=engine.Counter(), mu=engine.PerParameter(mu_dtype)
        ),
        scalars=scalars,
        choices=choices,
        given="parts",
        takes_complex=True,
        facts=facts,
    )
