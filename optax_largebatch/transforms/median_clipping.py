"""Clipping of the gradient by the median of its recent norms."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import arguments, engine
from optax_largebatch.arguments import Scalar
from optax_largebatch.engine.state import check_shape
from optax_largebatch.norms import accumulation_dtype
from optax_largebatch.numerics import is_due
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements

MEASURE_PERIOD = 4
"""How many steps are between two measurements of the parameters."""

_FIRST_ESTIMATES = (10, 20, 40)
"""Numbers of steps, within the first window, after which a first threshold is set."""


class ClipByMedianNormState(NamedTuple):
    """State of `clip_by_median_norm`."""

    count: jax.Array
    """Steps taken, shape ()."""
    rms: jax.Array
    """The root mean square of each block when it was last measured, in the order of
    `jax.tree.leaves`; for a leaf that stacks layers, in the order of its layers. 0 before the first
    step."""
    norms: jax.Array
    """The norms of the last steps, one slot for each step of the window."""
    threshold: jax.Array
    """The largest norm that is not clipped, shape (); the largest number of the dtype at first."""


def clip_by_median_norm(
    clipping_scale: Scalar | None,
    *,
    window: int = 100,
    scalar_scale: Scalar = 0.1,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shrinks the whole gradient where its norm exceeds a multiple of the median norm.

    .. math::

        g \leftarrow \min\left(1, \frac{\theta}{n_t}\right) g, \qquad
        n_t^2 = \sum_{\text{blocks}} \lVert \operatorname{rms}(w) \, g \rVert^2

    The norm is that of the gradient with respect to relative changes of the parameters. After every
    `window` steps, the threshold :math:`\theta` becomes `clipping_scale` times the median norm of
    these steps. In the first window, after 10, 20 and 40 steps, it becomes twice `clipping_scale`
    times the median so far. The first 10 steps are not clipped.

    A gradient whose norm is not finite becomes 0. A median that is not finite, or 0, leaves the
    threshold as it is.

    Args:
        clipping_scale: the bound, relative to the median of recent norms: 2.0 in icefall. Positive;
            None for no clipping, so that a chain keeps the layout of its state.
        window: how many norms the median is taken of: 100 in icefall. 1 or more.
        scalar_scale: what blocks of one element have in place of the root mean square, since the
            size of one element says little: 0.1 in icefall. 0 or more.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ClipByMedianNormState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import clip_by_median_norm
        >>> params = jnp.array([1.0, -1.0])
        >>> transform = clip_by_median_norm(1.5)
        >>> state = transform.init(params)
        >>> for _ in range(11):
        ...     updates, state = transform.update(params, state, params)
        >>> updates, state = transform.update(100 * params, state, params)
        >>> print(updates)  # 2 * 1.5 times the median
        [ 3. -3.]

    References:
        icefall, `egs/librispeech/ASR/zipformer/optim.py`: `ScaledAdam`, the argument
        `clipping_scale`.
    """
    arguments.check_optional_number("clipping_scale", clipping_scale)
    arguments.check_integer("window", window, at_least=1)
    arguments.check_numbers("[0, inf)", scalar_scale=scalar_scale)
    stacks = check_stacked(stacked)

    def no_threshold(params: optax.Params) -> jax.Array:
        dtype = _dtype(params)
        return jnp.asarray(jnp.finfo(dtype).max, dtype)

    def scalars(state: ClipByMedianNormState) -> tuple[Any, ...]:
        check_shape("norms", state.norms, (window,))
        return state.count, clipping_scale, scalar_scale, is_due(state.count, MEASURE_PERIOD)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        count, clipping_scale, weight, is_measured = at.scalars
        if clipping_scale is None:
            return update, at.state
        rms = at.state.rms
        if at.choice:
            (now,) = yield engine.block_rms(at.param)
            weight = rms
            (rms,) = yield engine.hoist(jnp.where(is_measured, now, rms))
        (norm,) = yield engine.global_norm(weight * update)
        norms = at.state.norms.at[count % window].set(norm)
        norms = jnp.where(count > 0, norms, 0)
        threshold = _threshold(count, clipping_scale, norms, at.state.threshold)
        (factor,) = yield engine.hoist(threshold / jnp.maximum(norm, threshold))
        clipped = jnp.where(factor > 0, factor * update, 0)  # a norm of NaN makes a factor of NaN
        return clipped, at.state._replace(rms=rms, norms=norms, threshold=threshold)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ClipByMedianNormState,
            count=engine.Counter(),
            rms=engine.NumberPerBlock(),
            norms=engine.Shared(lambda params: jnp.zeros(window, _dtype(params))),
            threshold=engine.Shared(no_threshold),
        ),
        scalars=scalars,
        choices=lambda leaves: have_several_elements(leaves, stacks),
        needs_params=True,
        stacked=stacks,
        given="parts",
    )


def _dtype(params: optax.Params) -> jnp.dtype:
    """The dtype of a norm of all parameters."""
    return accumulation_dtype(*map(jnp.result_type, jax.tree.leaves(params)))


def _threshold(
    count: jax.Array,
    clipping_scale: Any,
    norms: jax.Array,
    threshold: jax.Array,
) -> jax.Array:
    """The threshold after `count` norms, from the last `norms.size` of them; usually unchanged."""
    window = norms.size
    full = (count > 0) & (count % window == 0)
    first_estimates = [step for step in _FIRST_ESTIMATES if step < window]
    early = jnp.any(count == jnp.asarray(first_estimates, count.dtype))

    def from_median() -> jax.Array:
        known = jnp.where(full, window, count)  # the slots without a norm are 0 and come first
        middle = window - known + jnp.minimum(2 * (known // 4), known - 1)
        median = jnp.sort(norms)[middle]
        new = jnp.where(full, 1, 2) * clipping_scale * median
        return jnp.where(jnp.isfinite(median) & (median > 0), new, threshold)

    return jax.lax.cond(full | early, from_median, lambda: threshold)
