"""Low-precision parameters with rounding errors that vanish on average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_integer, check_state
from optax_largebatch.norms import cast
from optax_largebatch.params.leaves import check_params, gradients_of, leaves_of
from optax_largebatch.params.placement import replicated
from optax_largebatch.wrappers.inner import check_inner


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    steps: jax.Array
    """Steps taken, shape (); with the seed, it gives the random numbers of the next step."""
    inner_state: optax.OptState
    """State of the inner transformation, which sees the parameters in float32."""


def stochastic_rounding(
    inner: optax.GradientTransformation,
    *,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rounds low-precision parameters up or down at random, so that no step is lost on average.

    A step below half a unit in the last place of a parameter is lost when it is added. In bfloat16
    that is a step of less than 1/512 of the parameter. `master_weights` adds up such steps in
    float32. This wrapper keeps nothing: with :math:`f` the inner transformation and
    :math:`x^- \le x \le x^+` the neighbours of :math:`x` in the dtype of the parameter,

    .. math::

        x = w + f(g, w), \qquad
        w \leftarrow \begin{cases}
            x^+ & \text{with probability } (x - x^-) / (x^+ - x^-) \\
            x^- & \text{otherwise}
        \end{cases}

    so that :math:`\mathrm{E}[w] = x`, computed in float32. Numbers that the dtype holds stay as
    they are, and so do infinities and NaNs. Finite numbers beyond its range are rounded as usual.
    Stochastic rounding takes no memory (`master_weights` takes 4 bytes for each parameter), but
    every step adds noise of up to a unit in the last place. Parameters of float32 and float64 are
    not rounded.

    The random numbers are a function of the seed, the step, the leaf and the place in it. Under
    `jit` they do not depend on how the leaf is split; inside `jax.shard_map` and `jax.pmap` each
    part of a split leaf has its own random numbers, and a leaf that all devices have whole stays
    the same on all.

    The updates of low-precision parameters come back in float32, and `optax.apply_updates` turns
    them into exactly the rounded parameters. (A parameter that falls in one step to less than
    :math:`2^{-12}` of its old value is off by a rounding error of float32.) Let this be the
    outermost wrapper, and see `master_weights` for `jax_numpy_dtype_promotion="strict"`.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        seed: the seed of the random numbers: the same seed rounds in the same way. 0 or more.

    Returns:
        A transformation that needs parameters; its state is a `StochasticRoundingState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `seed` is negative.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import stochastic_rounding
        >>> params = jnp.ones(10_000, jnp.bfloat16)
        >>> optimizer = stochastic_rounding(optax.sgd(0.001))
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.ones(10_000), state, params)
        >>> with jax.numpy_dtype_promotion("standard"):  # the default of jax
        ...     params = optax.apply_updates(params, updates)
        >>> print(sorted({float(x) for x in params}))  # optax.sgd alone leaves them all at 1
        [0.99609375, 1.0]
        >>> print(f"{params.astype(jnp.float32).mean():.3f}")
        0.999

    References:
        Gupta et al., *Deep Learning with Limited Numerical Precision*, arXiv 1502.02551.
        Zamirai et al., *Revisiting BFloat16 Training*, arXiv 2010.06192.
    """
    inner = check_inner(inner)
    check_integer("seed", seed, at_least=0)

    def is_low(param: jax.Array) -> bool:
        return jnp.finfo(param.dtype).bits < 32

    def wide(x: jax.Array, param: jax.Array) -> jax.Array:
        """An array of a low-precision parameter in float32, any other as it is."""
        return cast(x, jnp.float32) if is_low(param) else x

    def init(params: optax.Params) -> StochasticRoundingState:
        leaves = leaves_of("params", params)
        inner_state = inner.init(leaves.rebuild(leaves.map(wide, leaves.arrays)))
        steps = replicated(jnp.zeros([], jnp.int32), params)
        return StochasticRoundingState(steps, inner_state)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_params("stochastic_rounding", "rounds them", params)
        check_state("stochastic_rounding", StochasticRoundingState, state)
        leaves, gradients = gradients_of(updates, params, extra_args.get("partition_specs"))
        before = leaves.map(wide, leaves.arrays)
        new, inner_state = inner.update(
            leaves.rebuild(leaves.map(wide, gradients)),
            state.inner_state,
            leaves.rebuild(before),
            **extra_args,
        )
        steps = leaves.align("the updates", new)
        key = jax.random.fold_in(jax.random.key(seed), state.steps)
        for index, param in enumerate(leaves.arrays):
            if steps[index] is None:
                continue
            now = before[index]
            step = steps[index].astype(now.dtype)
            if is_low(param):
                leaf_key = jax.random.fold_in(key, index)
                for axis in sorted(leaves.split(index).within):
                    leaf_key = jax.random.fold_in(leaf_key, jax.lax.axis_index(axis))
                bits = jax.random.bits(leaf_key, param.shape, jnp.uint16)
                step = rounded(now + step, param.dtype, bits) - now
            steps[index] = step
        number = jnp.asarray(optax.safe_increment(state.steps))
        return leaves.rebuild(steps), StochasticRoundingState(number, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def rounded(x: jax.Array, dtype: jnp.dtype, bits: jax.Array) -> jax.Array:
    """Numbers of float32, each rounded to one of its two neighbours in a dtype of 16 bits.

    All of this is exact, except for probabilities that are no multiple of 2**-16. Only numbers too
    small to be normal in float16 have such probabilities.

    Args:
        x: the numbers, float32.
        dtype: bfloat16 or float16.
        bits: random 16-bit integers, like `x`.

    Returns:
        Numbers of `dtype`, as float32; numbers beyond its largest are unchanged.
    """
    info = jnp.finfo(dtype)
    exponent = jnp.full_like(x, jnp.inf).view(jnp.uint32)
    power_of_two = (x.view(jnp.uint32) & exponent).view(jnp.float32)
    power_of_two = jnp.maximum(power_of_two, float(info.smallest_normal))
    units = jnp.abs(x) / power_of_two * 2.0**info.nmant
    whole = jnp.floor(units)
    drawn = (bits.astype(jnp.float32) + 0.5) * 2.0**-16
    is_up = drawn < units - whole
    units = whole + is_up.astype(jnp.float32)
    magnitude = units * 2.0**-info.nmant * power_of_two
    return jnp.where(jnp.abs(x) <= float(info.max), jnp.copysign(magnitude, x), x)
