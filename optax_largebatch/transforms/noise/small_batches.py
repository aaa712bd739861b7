"""The gradient norms of the parts of a batch, which `measure_noise_scale` compares."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.arguments import Scalar, check_condition, check_number
from optax_largebatch.engine.compilation import reduction_barrier
from optax_largebatch.params.leaves import Leaves, gradients_of
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.shapes import Shape
from optax_largebatch.params.stacked import Stacks, check_stacked


class SmallBatches(NamedTuple):
    """The parts of a batch and the whole of it, which `measure_noise_scale` compares."""

    square_norms: jax.Array
    """The mean squared norm of the parts' gradients, for each block; the weight of a part is its
    number of examples."""
    square_norms_of_mean: jax.Array
    """The squared norm of the mean of these gradients, for each block; zeros until all parts are
    there."""
    number: jax.Array
    """The number of parts, shape (); 0 in a step that is not measured."""
    examples: jax.Array
    """The number of examples in all parts together, shape ()."""

    @classmethod
    def none(cls, blocks: int) -> "SmallBatches":
        """The value without any part, for a number of blocks."""
        shapes = [(blocks,), (blocks,), (), ()]  # arrays of their own, as a donated state needs
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def with_part(
        self,
        square_norms: jax.Array,
        examples: jax.Array,
    ) -> "SmallBatches":
        """This value with a part added; a part without examples adds nothing, not even a NaN."""
        if square_norms.shape != self.square_norms.shape:
            raise ValueError(
                f"the state's small_batches has {self.square_norms.size} entries and the "
                f"parameters have {square_norms.size} blocks. Call `init` with the same `stacked`, "
                "and with whole parameters (outside of shard_map)."
            )
        filled = examples > 0
        total = self.examples + examples
        share = examples / jnp.where(filled, total, 1)
        further = jnp.where(filled, share * (square_norms - self.square_norms), 0)
        return self._replace(
            square_norms=self.square_norms + further,
            number=self.number + filled.astype(total.dtype),
            examples=total,
        )


def small_batches_of_devices(
    gradients: Any,
    params: Any,
    *,
    axis_name: str | tuple[str, ...],
    batch_size: Scalar = 1.0,
    mean: Any,
    when: bool | jax.Array = True,
    partition_specs: Any = None,
    stacked: Stacks = None,
) -> SmallBatches:
    r"""Gradient norms of the devices' batches, inside `jax.shard_map` or `jax.pmap`.

    It needs the gradients of each device's own examples, and their mean. The devices exchange one
    short vector, in one reduction, and only in the steps that are measured.

    Inside `jax.shard_map`, JAX sums the gradient with respect to shared parameters over the devices
    at once. `jax.lax.pcast(params, axis_name, to="varying")` (before jax 0.8.2
    `jax.lax.pvary(params, axis_name)`) gives parameters whose gradients stay separate.

    Args:
        gradients: the gradients of this device's examples.
        params: the parameters, as the optimizer is given them.
        axis_name: the mesh axes over which the examples are split.
        batch_size: examples on each device. It is the unit: with 1, the noise scale counts batches
            of a device. Positive.
        mean: the mean of these gradients, which is the gradient of the step; a tree like the
            parameters.
        when: whether this step is measured, the same on all devices; it may be traced, as in
            `when=step % 10 == 0`. Otherwise no gradient is read.
        partition_specs: how the parameters are split over other mesh axes; needed under `jax.pmap`
            and `check_vma=False`. None where the array types say it, or nothing is split.
        stacked: the same as for `measure_noise_scale`.

    Returns:
        The extra argument `small_batches` of `update`.

    Raises:
        ValueError: there is only one device; the gradients are the same on all devices; their mean
            or `when` differs between devices; or a parameter is split over the examples' axes, so
            that its gradients are summed already.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import small_batches_of_devices
        >>> def parts(gradients):
        ...     return small_batches_of_devices(
        ...         gradients, jnp.zeros(()), axis_name="data", batch_size=4,
        ...         mean=jax.lax.pmean(gradients, "data"))
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
            "a single batch says nothing about the noise. Use the micro-batches of "
            "accumulate_gradients, or small_batches_of_examples."
        )
    _check_when(when)
    leaves, of_mean = gradients_of(mean, params, partition_specs, name="mean")
    of_devices = _checked(gradients, leaves, ())
    for index, gradient in enumerate(of_devices):
        if gradient is None:
            continue
        if leaves.split(index).within & set(names):
            raise ValueError(
                f"params: {leaf_names(params)[index]!r} is split along axis_name, {axis_name!r}, "
                "so that its gradients have been summed over the examples of all devices. Use the "
                "micro-batches of accumulate_gradients."
            )
        if _is_reduced(gradient, names):
            raise ValueError(
                "gradients must be those of each device's examples; the gradient of "
                f"{leaf_names(params)[index]!r} is the same on all devices along {axis_name!r}. "
                "Inside jax.shard_map, differentiate with respect to "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), and take the mean after this."
            )
    parts = Gradients(of_devices, over=frozenset(names))
    squares = block_square_norms(leaves, stacked, when, parts, Gradients(of_mean))
    return _small_batches(squares, number, batch_size, when)


def small_batches_of_examples(
    gradients: Any,
    params: Any,
    *,
    batch_size: Scalar = 1.0,
    mean: Any,
    when: bool | jax.Array = True,
    partition_specs: Any = None,
    stacked: Stacks = None,
) -> SmallBatches:
    r"""Gradient norms of single examples or small batches, from gradients along a first axis.

    Args:
        gradients: a tree like the parameters, each array with an axis of examples before its own
            axes, as `jax.vmap(jax.grad(loss), in_axes=(None, 0))` gives it.
        params: the parameters, as the optimizer is given them.
        batch_size: examples in each of the gradients, 1 for those of single examples. Positive.
        mean: the mean of these gradients, which is the gradient of the step; a tree like the
            parameters.
        when: whether this step is measured, the same on all devices; it may be traced, as in
            `when=step % 10 == 0`. Otherwise no gradient is read.
        partition_specs: how the parameters are split, as for `update`.
        stacked: the same as for `measure_noise_scale`.

    Returns:
        The extra argument `small_batches` of `update`.

    Raises:
        ValueError: there is only one gradient, or shapes differ.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import small_batches_of_examples
        >>> loss = lambda w, x: jnp.square(w - x) / 2
        >>> examples = jnp.array([1.0, 3.0])
        >>> gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(0.0, examples)
        >>> parts = small_batches_of_examples(gradients, jnp.zeros(()), mean=gradients.mean(0))
        >>> print(parts.square_norms, parts.square_norms_of_mean, parts.examples)
        [5.] [4.] 2.0
    """
    check_number("batch_size", batch_size, "(0, inf)")
    _check_when(when)
    leaves, of_mean = gradients_of(mean, params, partition_specs, name="mean")
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(gradients)}
    if len(lengths) != 1 or min(lengths) < (2,):
        raise ValueError(
            "gradients must have a first axis of two examples or more, the same for each "
            f"parameter; got {sorted(lengths)}. A single batch says nothing about the noise."
        )
    ((number,),) = lengths
    parts = Gradients(_checked(gradients, leaves, (number,)), first_axes=1)
    squares = block_square_norms(leaves, stacked, when, parts, Gradients(of_mean))
    return _small_batches(squares, number, batch_size, when)


class Gradients(NamedTuple):
    """Gradients whose squared norms are added up over first axes and over mesh axes."""

    arrays: Sequence[Any]
    """The array of each parameter, or None."""
    first_axes: int = 0
    """The number of axes before those of the parameter."""
    over: frozenset[str] = frozenset()
    """The mesh axes along which there is a gradient on each device."""


def block_square_norms(
    leaves: Leaves,
    stacked: Stacks,
    when: Any,
    *kinds: Gradients,
) -> list[jax.Array]:
    """The squared norms of gradients, taken together.

    All is in one conditional, the reductions between devices too: a step that is not measured
    reads no gradient and waits for no other device.

    Args:
        leaves: the parameters.
        stacked: the stacks.
        when: whether they are taken; the same on all devices.
        *kinds: the gradients.

    Returns:
        For each of the kinds a float32 vector with one entry for each block, the same on all
        devices; zeros where none are taken.
    """
    blocks = check_stacked(stacked, segments=False).over_blocks(leaves)

    def taken() -> list[jax.Array]:
        squares: list[jax.Array] = []
        splits: list[norms.Split] = []
        for gradients, first_axes, over in kinds:
            for index, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                axes = blocks[index].axes
                kept = tuple(axis + first_axes for axis in axes)
                square = norms.sum_of_squares(gradient, kept)
                squares.append(jnp.squeeze(square, range(first_axes)) if kept else square)
                split = leaves.split(index, axes)
                splits.append(split._replace(within=split.within | over))
        totals = iter(reduction_barrier(norms.over_shards(squares, splits)))

        def vector(gradients: Sequence[Any]) -> jax.Array:
            of_leaves = []
            for index, gradient in enumerate(gradients):
                total = 0 if gradient is None else next(totals)
                total = jnp.asarray(total, jnp.float32)
                of_leaves.append(blocks[index].vector(total, index, leaves))
            return jnp.concatenate(of_leaves)

        return [vector(kind.arrays) for kind in kinds]

    def not_taken() -> list[jax.Array]:
        return [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(taken)]

    return jax.lax.cond(when, taken, not_taken)


def _small_batches(
    squares: Sequence[jax.Array],
    number: int,
    batch_size: Any,
    when: Any,
) -> SmallBatches:
    """`number` parts of one size, from the sum of their squared norms and that of their mean."""
    of_parts, of_mean = squares
    measured = jnp.where(when, jnp.float32(number), 0)
    examples = measured * jnp.asarray(batch_size, jnp.float32)
    return SmallBatches(of_parts / number, of_mean, measured, examples)


def _check_when(when: Any) -> None:
    """Checks that `when` says the same on all devices, as far as is known before it runs."""
    check_condition("when", when)
    remedy = "Compute it from a step count that is the same on all."
    norms.check_same_everywhere("when", when, remedy)


def _checked(gradients: Any, leaves: Leaves, first: Shape) -> list[Any]:
    """The gradient of each parameter, or None; its shape is `first` and that of the parameter."""
    checked = leaves.align("gradients", gradients)
    for index, (gradient, param) in enumerate(zip(checked, leaves.arrays, strict=True)):
        shape = (*first, *param.shape)
        if gradient is not None and jnp.shape(gradient) != shape:
            raise ValueError(
                f"gradients: the gradient of {leaf_names(leaves.tree)[index]!r} must have the "
                f"shape {shape}, got {jnp.shape(gradient)}."
            )
    return [None if gradient is None else jnp.asarray(gradient) for gradient in checked]


def _is_reduced(gradient: Any, names: tuple[str, ...]) -> bool:
    """Whether the type of a gradient says that it is the same along mesh axes."""
    position = norms.varying_axes(jax.lax.axis_index(names))  # nothing varies where types are empty
    return bool(position) and not set(names) <= norms.varying_axes(gradient)
