"""The gradients of the parts of a batch, of which `gradient_noise_scale` needs only the norms."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.arguments import Scalar, check_number
from optax_largebatch.params.leaves import Leaves, gradients_of
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacked, check_stacked
from optax_largebatch.transforms.compilation import together
from optax_largebatch.transforms.link import blocks_of_leaf


class SmallBatches(NamedTuple):
    """The parts of a batch: what `gradient_noise_scale` compares with the whole of it."""

    square_norms: jax.Array
    """For each block the mean over the parts of the squared norm of their gradients; parts of
    different sizes weigh as many examples as they have."""
    number: jax.Array
    """Parts, shape ()."""
    examples: jax.Array
    """Examples in all parts together, shape ()."""

    @classmethod
    def none(cls, blocks: int) -> "SmallBatches":
        """No parts of a gradient with so many blocks."""
        zero = jnp.zeros([], jnp.float32)
        return cls(jnp.zeros(blocks, jnp.float32), zero, zero)

    def with_part(self, square_norms: jax.Array, examples: jax.Array) -> "SmallBatches":
        """Another part added; one of no examples adds nothing, not even a NaN."""
        if square_norms.shape != self.square_norms.shape:
            raise ValueError(
                f"the state's small_batches has {self.square_norms.size} entries and the "
                f"parameters have {square_norms.size} blocks. Call `init` with the whole "
                "parameters (outside of shard_map, where a stack is split between its layers) and "
                "with the same `stacked`."
            )
        filled = examples > 0
        total = self.examples + examples
        share = jnp.where(filled, examples / jnp.where(filled, total, 1), 0)
        further = jnp.where(filled, share * (square_norms - self.square_norms), 0)
        return SmallBatches(
            self.square_norms + further, self.number + filled.astype(total.dtype), total
        )


def small_batches_of_devices(
    gradients: Any,
    params: Any,
    axis_name: str | tuple[str, ...],
    batch_size: Scalar = 1.0,
    *,
    partition_specs: Any = None,
    stacked: Stacked | None = None,
) -> SmallBatches:
    r"""The batches of the devices, inside `jax.shard_map` or `jax.pmap`.

    It takes the gradients that each device has of its own examples, before their mean is taken,
    and adds up the squares of their norms in one reduction of a short vector.

    Inside `jax.shard_map` the gradient with respect to parameters that all devices share is
    summed over the devices at once. `jax.lax.pcast(params, axis_name, to="varying")` (before jax
    0.8.2 `jax.lax.pvary(params, axis_name)`) makes parameters whose gradients stay apart.

    Args:
        gradients: the gradients of this device's examples.
        params: the parameters, as the optimizer is given them.
        axis_name: the mesh axes over which the examples are split.
        batch_size: examples on each device, positive; 1 for a noise scale in such batches.
        partition_specs: how the parameters are split over other mesh axes, under `jax.pmap` and
            `check_vma=False`. None where the types say it, or nothing is split.
        stacked: what `gradient_noise_scale` is given.

    Returns:
        The extra argument `small_batches` of `update`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is one device only, the gradients are the same on all devices, or a
            parameter is split over the examples' axes, so that its gradients are summed already.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import small_batches_of_devices
        >>> def parts(gradients):
        ...     return small_batches_of_devices(gradients, jnp.zeros(()), "data", batch_size=4)
        >>> devices = jax.device_count()
        >>> if devices > 1:
        ...     parts = jax.pmap(parts, axis_name="data")(jnp.full(devices, 3.0))
        ...     assert parts.square_norms[0] == 9 and parts.examples[0] == 4 * devices
    """
    check_number("batch_size", batch_size, "(0, inf)")
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    number = norms.devices_along(names)
    if number < 2:
        raise ValueError(
            f"axis_name must name mesh axes with two devices or more, got {axis_name!r} with one: "
            "a single batch says nothing of the noise. Use the micro-batches of "
            "accumulate_gradients, or small_batches_of_examples."
        )
    leaves, _ = gradients_of(params, params, partition_specs)
    own = _checked(gradients, leaves, ())
    for index, gradient in enumerate(own):
        split = leaves.split(index).within & set(names) if gradient is not None else ()
        name = leaf_names(params)[index] if split or _is_reduced(gradient, names) else ""
        if split:
            raise ValueError(
                f"params: {name!r} is split along axis_name, {axis_name!r}, so that its gradients "
                "have been summed over the examples of all devices. Use the micro-batches of "
                "accumulate_gradients."
            )
        if name:
            raise ValueError(
                "gradients must be those of each device's examples; that of "
                f"{name!r} is the same on all devices along {axis_name!r}. Inside jax.shard_map, "
                "differentiate with respect to "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), and take the mean after this."
            )
    squares = block_square_norms(leaves, own, check_stacked(stacked), over=frozenset(names))
    return _small_batches(squares, number, batch_size)


def small_batches_of_examples(
    gradients: Any,
    params: Any,
    batch_size: Scalar = 1.0,
    *,
    partition_specs: Any = None,
    stacked: Stacked | None = None,
) -> SmallBatches:
    r"""Single examples, or small batches, whose gradients stand along a first axis.

    Args:
        gradients: a tree like the parameters, each leaf with an axis of examples before its own,
            as `jax.vmap(jax.grad(loss), in_axes=(None, 0))` gives it.
        params: the parameters, as the optimizer is given them.
        batch_size: examples in each of the gradients, positive.
        partition_specs: how the parameters are split, as for `update`.
        stacked: what `gradient_noise_scale` is given.

    Returns:
        The extra argument `small_batches` of `update`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is only one gradient, or shapes differ.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import small_batches_of_examples
        >>> loss = lambda w, x: jnp.square(w - x) / 2
        >>> examples = jnp.array([1.0, 3.0])
        >>> gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(0.0, examples)
        >>> parts = small_batches_of_examples(gradients, jnp.zeros(()))
        >>> print(parts.square_norms, parts.examples)
        [5.] 2.0
    """
    check_number("batch_size", batch_size, "(0, inf)")
    leaves, _ = gradients_of(params, params, partition_specs)
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(gradients)}
    if len(lengths) != 1 or min(lengths) < (2,):
        raise ValueError(
            "gradients must have a first axis of two examples or more, the same for each "
            f"parameter; got {sorted(lengths)}. A single batch says nothing of the noise."
        )
    ((number,),) = lengths
    own = _checked(gradients, leaves, (number,))
    squares = block_square_norms(leaves, own, check_stacked(stacked), first_axes=1)
    return _small_batches(squares, number, batch_size)


def block_square_norms(
    leaves: Leaves,
    gradients: Sequence[Any],
    stacked: Stacked,
    *,
    first_axes: int = 0,
    over: frozenset[str] = frozenset(),
) -> jax.Array:
    """The squared norms of gradients, added up over first axes and mesh axes.

    Args:
        leaves: the parameters.
        gradients: the gradient of each, or None.
        stacked: the stacks.
        first_axes: how many axes they have before those of the parameter.
        over: the mesh axes along which there is a gradient on each device.

    Returns:
        A float32 vector with one entry for each block, the same on all devices.
    """
    axes = stacked.axes(leaves.tree)
    squares, splits = {}, {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            kept = tuple(axis + first_axes for axis in axes[index])
            own = norms.sum_of_squares(gradient, kept)
            squares[index] = jnp.squeeze(own, range(first_axes)) if kept else own
            split = leaves.split(index, axes[index])
            splits[index] = split._replace(within=split.within | over)
    whole = together(norms.over_shards(squares, splits))
    parts = [
        blocks_of_leaf(jnp.asarray(whole.get(index, 0), jnp.float32), index, own, leaves)
        for index, own in enumerate(axes)
    ]
    return jnp.concatenate(parts)


def _small_batches(squares: jax.Array, number: int, batch_size: Any) -> SmallBatches:
    """So many parts of one size, from the sum of the squared norms of their gradients."""
    examples = number * jnp.asarray(batch_size, jnp.float32)
    return SmallBatches(squares / number, jnp.asarray(number, jnp.float32), examples)


def _checked(gradients: Any, leaves: Leaves, first: tuple[int, ...]) -> list[Any]:
    """The gradient of each parameter, or None; its shape is `first` and that of the parameter."""
    own = leaves.align("gradients", gradients)
    for index, (gradient, param) in enumerate(zip(own, leaves.arrays, strict=True)):
        if gradient is None:
            continue
        own[index] = jnp.asarray(gradient)
        if own[index].shape != (*first, *param.shape):
            raise ValueError(
                f"gradients: that of {leaf_names(leaves.tree)[index]!r} must have the shape "
                f"{(*first, *param.shape)}, got {own[index].shape}."
            )
    return own


def _is_reduced(gradient: Any, names: tuple[str, ...]) -> bool:
    """Whether the type of a gradient says that it is the same along mesh axes."""
    if gradient is None:
        return False
    position = norms.varying_axes(jax.lax.axis_index(names))  # nothing varies where types are empty
    return bool(position) and not set(names) <= norms.varying_axes(gradient)
