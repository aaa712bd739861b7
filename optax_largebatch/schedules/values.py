"""A schedule read from a table."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax


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
            f"values must be a 1-D array or an iterable of numbers, got {values!r} of type "
            f"{type(values).__name__}."
        ) from None
    if table.ndim != 1 or table.size == 0:
        raise ValueError(f"values must be a non-empty 1-D sequence, got the shape {table.shape}.")
    if not np.isfinite(table).all():
        raise ValueError(f"values must be finite, got {table[~np.isfinite(table)][0]}.")

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        last = table.size - 1
        return jnp.asarray(table)[jnp.clip(jnp.asarray(step), 0, last)]

    return schedule
