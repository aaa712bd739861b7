"""Finds gradients that are the sum over devices in place of the mean, or the reverse."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.params.leaves import gradients_of


def check_gradient_reduction(
    loss: Callable[[Any], jax.Array],
    params: Any,
    gradients: Any,
    *,
    axis_name: str | tuple[str, ...],
    partition_specs: Any = None,
) -> jax.Array:
    r"""The factor by which gradients are too large, inside `jax.shard_map` or `jax.pmap`.

    If each device takes the loss over its own examples, the gradient with respect to shared
    parameters is the *sum* over the devices: `jax.shard_map` adds it up by itself. Training needs
    the mean; the sum is larger by the number of devices. Adam and trust ratios hide this factor;
    clipping, weight decay and SGD do not. With :math:`L` the mean over devices of `loss`,

    .. math::

        s = \frac{\lVert g \rVert^2}{\partial_g L(w)}

    is 1 for the gradient of :math:`L`. It is the number of devices for a sum, and the inverse of
    this number for a mean that was divided once more.

    It costs about a forward and a backward pass: check it once, before a run.

    Args:
        loss: the loss of this device's examples as a function of the parameters alone.
        params: the parameters.
        gradients: the gradients that the optimizer is given.
        axis_name: the mesh axes over which the examples are split.
        partition_specs: how the parameters are split, under `jax.pmap` and `check_vma=False`; see
            `gradients_of`. None where the array types say it, or nothing is split.

    Returns:
        :math:`s`, shape (), the same on all devices; NaN where the gradient is zero.

    Raises:
        ValueError: gradients and parameters differ in structure or shapes, or a gradient is not
            reduced at all.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import check_gradient_reduction
        >>> def scale(params, batch):
        ...     loss = lambda params: jnp.mean((batch - params) ** 2)
        ...     gradients = jax.lax.psum(jax.grad(loss)(params), "data")
        ...     return check_gradient_reduction(loss, params, gradients, axis_name="data")
        >>> devices = jax.device_count()
        >>> batches = jnp.arange(4.0 * devices).reshape(devices, 4)
        >>> check = jax.pmap(scale, axis_name="data", in_axes=(None, 0))
        >>> print(check(jnp.zeros(()), batches)[0] == devices)
        True
    """
    leaves, given = gradients_of(gradients, params, partition_specs)
    direction = [
        jnp.zeros_like(leaf) if gradient is None else gradient.astype(leaf.dtype)
        for gradient, leaf in zip(given, leaves.arrays, strict=True)
    ]
    _, slope = jax.jvp(loss, (params,), (leaves.rebuild(direction),))
    slope = jax.lax.pmean(slope.astype(norms.accumulation_dtype(slope.dtype)), axis_name)
    return leaves.sum_of_squares(direction) / slope
