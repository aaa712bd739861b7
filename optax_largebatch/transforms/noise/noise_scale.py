"""The gradient noise scale: how the noise of single examples compares with the gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_number, check_state
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.stacked import Stacks, check_stacked
from optax_largebatch.transforms.noise.small_batches import SmallBatches


class MeasureNoiseScaleState(NamedTuple):
    """State of `measure_noise_scale`.

    The vectors have one entry for each block, in the order of `jax.tree.leaves` (for a leaf that
    stacks layers, in the order of its layers), and a last entry for all blocks together.
    """

    weight: jax.Array
    """The sum of the weights of the steps in the averages, shape (); 0 before the first step."""
    square_weight: jax.Array
    """The sum of the squares of these weights, shape ()."""
    noise: jax.Array
    """The average of the trace of the covariance of one example's gradient."""
    signal: jax.Array
    """The average of the squared norm of the gradient without noise."""
    noise_variance: jax.Array
    """The variance of the noise of single steps around its average."""
    signal_variance: jax.Array
    """The variance of the signal of single steps around its average."""
    covariance: jax.Array
    """The covariance of noise and signal of single steps."""


def measure_noise_scale(
    decay: Scalar = 0.99,
    *,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Measures how noisy the gradient is, for `noise_scale`, and passes the gradient on unchanged.

    A batch of :math:`B` examples has the gradient :math:`g_B`, and its :math:`k` parts of
    :math:`b = B / k` examples have gradients :math:`g_b`. With the mean of
    :math:`\lVert g_b \rVert^2` over the parts, the estimates

    .. math::

        \lvert G \rVert^2 \approx \frac{B \lVert g_B \rVert^2 - b \lVert g_b \rVert^2}{B - b},
        \qquad
        \operatorname{tr} \Sigma \approx
            \frac{\lVert g_b \rVert^2 - \lVert g_B \rVert^2}{1 / b - 1 / B}

    have no bias. Each estimate is averaged over steps, and the noise scale is the ratio of the
    averages, :math:`\operatorname{tr} \Sigma / \lVert G \rVert^2`: the batch size at which noise
    and gradient are equally large. It is a diagnostic: only runs can tell how large a batch still
    pays off at a given learning rate and preconditioner.

    `update` takes the extra argument `small_batches`, from one of three sources:

    - micro-batches: `accumulate_gradients` with `small_batches=True` passes them on by itself;
    - the devices of `jax.shard_map` and `jax.pmap`: `small_batches_of_devices`;
    - the gradients of single examples: `small_batches_of_examples`.

    The source takes all norms and decides which steps are measured: one step in ten costs hardly
    anything. This transformation reads no gradient itself, so it may stand anywhere in a chain. At
    the start of the chain it does not separate transformations that run together. Divide a loss
    scale out of the gradients before. A step changes no average if it is not measured, has only one
    small batch, or has norms that are not finite.

    Args:
        decay: the weight of a measured step divided by that of the next: 0.99 averages over about
            100 measured steps, 0.95 over 20. In [0, 1).
        stacked: the parameters that stack layers, so that each layer has a noise scale of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation; its state is a `MeasureNoiseScaleState`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import (
        ...     chain, measure_noise_scale, lamb, noise_scale, small_batches_of_examples)
        >>> loss = lambda w, x: jnp.sum(jnp.square(w - x)) / 2
        >>> params = jnp.ones(4)  # its gradient is 1 + noise of variance 1, for each of four
        >>> optimizer = chain(measure_noise_scale(), lamb(0.0))
        >>> state = optimizer.init(params)
        >>> @jax.jit
        ... def step(state, key):
        ...     gradients = jax.vmap(jax.grad(loss), (None, 0))(
        ...         params, jax.random.normal(key, (32, 4)))
        ...     mean = gradients.mean(0)
        ...     small_batches = small_batches_of_examples(gradients, params, mean=mean)
        ...     return optimizer.update(mean, state, params, small_batches=small_batches)[1]
        >>> for key in jax.random.split(jax.random.key(0), 200):
        ...     state = step(state, key)
        >>> print(round(float(noise_scale(state).noise_scale), 1))
        1.0

    References:
        McCandlish et al., *An Empirical Model of Large-Batch Training*, arXiv 1812.06162,
        appendix A.1.
    """
    check_number("decay", decay, "[0, 1)")
    stacks = check_stacked(stacked, segments=False)

    def init(params: optax.Params) -> MeasureNoiseScaleState:
        blocks = sum(stacks.sizes(params))
        shapes = [(), (), *[(blocks + 1,)] * 5]  # arrays of their own, as a donated state needs
        zeros = MeasureNoiseScaleState(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
        return replicated(zeros, params)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        small_batches: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MeasureNoiseScaleState]:
        del params, extra_args
        check_state("measure_noise_scale", MeasureNoiseScaleState, state)
        return updates, _with_step(state, _checked(small_batches, state), decay)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(
    small_batches: Any,
    state: MeasureNoiseScaleState,
) -> SmallBatches:
    """The extra argument of `update`."""
    if small_batches is None:
        raise ValueError(
            "small_batches must be given to `update`, because measure_noise_scale compares the "
            "gradient with those of parts of its batch; got None. There are three ways: "
            "accumulate_gradients(optimizer, every=every, small_batches=True) passes on its "
            "micro-batches; inside shard_map and pmap pass "
            "small_batches=small_batches_of_devices(own_grads, params, axis_name=axis_name, "
            "mean=grads), with the gradients of each device; or pass "
            "small_batches=small_batches_of_examples(own_grads, params, mean=grads)."
        )
    if not isinstance(small_batches, SmallBatches):
        raise TypeError(
            "small_batches must be what small_batches_of_devices or small_batches_of_examples "
            f"returns, got a {type(small_batches).__name__}."
        )
    blocks = state.noise.size - 1
    if small_batches.square_norms.size != blocks:
        raise ValueError(
            f"small_batches has {small_batches.square_norms.size} blocks and measure_noise_scale "
            f"has {blocks}. Give both the same parameters and the same `stacked`."
        )
    return small_batches


def _with_step(
    state: MeasureNoiseScaleState,
    small: SmallBatches,
    decay: Any,
) -> MeasureNoiseScaleState:
    """The averages with another step.

    They are weighted means and variances at every step (West 1979), which need no correction for
    their start and no difference of large numbers.
    """
    of_parts, of_whole = (
        jnp.append(x, jnp.sum(x)) for x in (small.square_norms, small.square_norms_of_mean)
    )
    others = jnp.maximum(small.number - 1, 1)
    noise = small.examples * (of_parts - of_whole) / others
    signal = (small.number * of_whole - of_parts) / others

    weight = decay * state.weight + 1
    share = 1 / weight
    from_noise = noise - state.noise
    from_signal = signal - state.signal

    def moved(variance: jax.Array, product: jax.Array) -> jax.Array:
        return (1 - share) * (variance + share * product)

    new = state._replace(
        weight=weight,
        square_weight=decay * decay * state.square_weight + 1,
        noise=state.noise + share * from_noise,
        signal=state.signal + share * from_signal,
        noise_variance=moved(state.noise_variance, jnp.square(from_noise)),
        signal_variance=moved(state.signal_variance, jnp.square(from_signal)),
        covariance=moved(state.covariance, from_noise * from_signal),
    )
    are_finite = jnp.all(jnp.isfinite(noise) & jnp.isfinite(signal))
    usable = are_finite & (small.number > 1)
    return jax.tree.map(lambda new, old: jnp.where(usable, new, old), new, state)
