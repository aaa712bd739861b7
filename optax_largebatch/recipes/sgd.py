"""SGD as in Goyal et al., from which layer-wise methods started."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.engine.chain import chain
from optax_largebatch.params.masks import Mask
from optax_largebatch.schedules.warmup import as_float
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.momentum import accumulate_momentum


def sgd(
    learning_rate: optax.Schedule, momentum: float, weight_decay: float, weight_decay_mask: Mask
) -> optax.GradientTransformationExtraArgs:
    """SGD with Nesterov's momentum; the rate multiplies the direction, as in PyTorch."""
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        accumulate_momentum(momentum, nesterov=True),
        scale_by_learning_rate(learning_rate),
    )


def warmup_and_drops(
    peak_value: float, begin_value: float, warmup_steps: int, drops: Sequence[int]
) -> optax.Schedule:
    """Linear warm-up, then a rate that falls to a tenth after each of the steps `drops`."""

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        grown = jnp.where(t < warmup_steps, t / max(warmup_steps, 1), 1.0)
        stairs = jnp.prod(jnp.where(t < jnp.asarray(drops, t.dtype), 1.0, 0.1))
        return (begin_value + (peak_value - begin_value) * grown) * stairs

    return schedule
