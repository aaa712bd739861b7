"""Eden and Eden2, which decay by batch and by epoch, and values from a table."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from optax_largebatch.arguments import Scalar, check_number, check_numbers, check_optional_number
from optax_largebatch.schedules.warmup import as_float


def eden(
    learning_rate: Scalar,
    *,
    lr_batches: Scalar = 5000,
    lr_epochs: Scalar = 6,
    steps_per_epoch: Scalar | None = None,
    warmup_batches: Scalar = 500,
    warmup_start: Scalar = 0.5,
) -> Callable[..., jax.Array]:
    r"""Eden: the learning rate falls with the steps and with the epochs, each to the power -1/2.

    .. math::

        \eta_t = \eta\, w_t \left(1 + (t / B)^2\right)^{-1/4} \left(1 + (e / E)^2\right)^{-1/4},
        \qquad w_t = s + (1 - s) \min(t / W, 1)

    Args:
        learning_rate: the rate before it falls: 0.045 for ScaledAdam in icefall. :math:`\eta`, 0 or
            more.
        lr_batches: how many batches it takes until the rate begins to fall: 5000 to 7500 in
            icefall. :math:`B`, positive.
        lr_epochs: how many epochs it takes until the rate begins to fall: 3.5 to 6 in icefall.
            :math:`E`, positive.
        steps_per_epoch: batches in an epoch, positive. The epoch of a step is then
            `floor(t / steps_per_epoch)`; None if the loop passes it.
        warmup_batches: how many batches the rate grows for; 0 for none, as in the original Eden.
            :math:`W`, 0 or more.
        warmup_start: the share of the rate at the first batch: usually 0.5. :math:`s`, in [0, 1].

    Returns:
        A schedule: `schedule(step)` (0 first), or `schedule(step, epoch)` with the epoch (0 first,
        possibly a fraction) from the loop.

    Raises:
        ValueError: an argument is out of its range; and, when the schedule is called, there is
            neither an epoch nor `steps_per_epoch`.

    Examples:
        >>> from optax_largebatch import eden
        >>> schedule = eden(0.1, lr_batches=100, lr_epochs=2, steps_per_epoch=50, warmup_batches=10)
        >>> print([f"{float(schedule(step)):.4f}" for step in (0, 10, 100)])
        ['0.0500', '0.0998', '0.0707']

    References:
        icefall, `optim.Eden`.
    """
    check_number("learning_rate", learning_rate, "[0, inf)")
    check_numbers("(0, inf)", lr_batches=lr_batches, lr_epochs=lr_epochs)
    check_optional_number("steps_per_epoch", steps_per_epoch)
    warmup = _warmup(warmup_batches, warmup_start)

    def schedule(step: ArrayLike, epoch: ArrayLike | None = None) -> jax.Array:
        t = as_float(step)
        if epoch is not None:
            e = as_float(epoch)
        elif steps_per_epoch is not None:
            e = jnp.floor(t / steps_per_epoch)
        else:
            raise ValueError(
                "eden needs the epoch: build it with steps_per_epoch=..., or call the schedule "
                "with schedule(step, epoch)."
            )
        by_batch = (1 + jnp.square(t / lr_batches)) ** -0.25
        by_epoch = (1 + jnp.square(e / lr_epochs)) ** -0.25
        return learning_rate * warmup(t) * by_batch * by_epoch

    return schedule


def eden2(
    learning_rate: Scalar,
    *,
    lr_batches: Scalar = 5000,
    warmup_batches: Scalar = 500,
    warmup_start: Scalar = 0.5,
) -> optax.Schedule:
    r"""Eden2: the learning rate falls with the steps alone.

    .. math::

        \eta_t = \eta\, w_t \left(1 + (t / B)^2\right)^{-1/2},
        \qquad w_t = s + (1 - s) \min(t / W, 1)

    Args:
        learning_rate: the rate before it falls: 0.045 for ScaledAdam in icefall. :math:`\eta`, 0 or
            more.
        lr_batches: how many batches it takes until the rate begins to fall: 5000 to 7500 in
            icefall. :math:`B`, positive.
        warmup_batches: how many batches the rate grows for; 0 for none. :math:`W`, 0 or more.
        warmup_start: the share of the rate at the first batch: usually 0.5. :math:`s`, in [0, 1].

    Returns:
        A schedule: step (0 first) to learning rate.

    Examples:
        >>> from optax_largebatch import eden2
        >>> schedule = eden2(0.1, lr_batches=100, warmup_batches=10)
        >>> print([f"{float(schedule(step)):.4f}" for step in (0, 10, 100)])
        ['0.0500', '0.0995', '0.0707']

    References:
        icefall, `optim.Eden2`.
    """
    check_number("learning_rate", learning_rate, "[0, inf)")
    check_number("lr_batches", lr_batches, "(0, inf)")
    warmup = _warmup(warmup_batches, warmup_start)

    def schedule(step: ArrayLike) -> jax.Array:
        t = as_float(step)
        return learning_rate * warmup(t) * (1 + jnp.square(t / lr_batches)) ** -0.5

    return schedule


def values_schedule(values: Iterable[float]) -> optax.Schedule:
    r"""The value `values[i]` at step `i`, and the last value from then on.

    Args:
        values: a 1-D array or any finite iterable of numbers, at least one.

    Returns:
        A schedule: step (0 first) to value, a scalar.

    Raises:
        TypeError: `values` is not iterable or does not hold numbers.
        ValueError: `values` is empty, has more than one axis, or holds a value that is not finite.

    Examples:
        >>> from optax_largebatch import values_schedule
        >>> schedule = values_schedule([0.5, 0.25, 0.125])
        >>> print([float(schedule(step)) for step in (0, 1, 2, 100)])
        [0.5, 0.25, 0.125, 0.125]
    """
    try:
        table = np.asarray(values if hasattr(values, "__array__") else list(values), dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"values must be a 1-D array or an iterable of numbers, got {values!r}."
        ) from None
    if table.ndim != 1 or table.size == 0:
        raise ValueError(f"values must be a non-empty 1-D sequence, got the shape {table.shape}.")
    if not np.isfinite(table).all():
        raise ValueError(f"values must be finite, got {table[~np.isfinite(table)][0]}.")

    def schedule(step: ArrayLike) -> jax.Array:
        return jnp.asarray(table)[jnp.clip(jnp.asarray(step), 0, table.size - 1)]

    return schedule


def _warmup(
    batches: Scalar,
    start: Scalar,
) -> Callable[[jax.Array], jax.Array]:
    """The factor `start + (1 - start) * min(t / batches, 1)`; 1 without a warm-up."""
    check_number("warmup_batches", batches, "[0, inf)")
    check_number("warmup_start", start, "[0, 1]")

    def factor(t: jax.Array) -> jax.Array:
        done = jnp.where(t < batches, t / jnp.maximum(batches, 1), 1.0)
        return start + (1 - start) * done

    return factor
