"""An optimizer that knows from the start how the parameters are split."""

from typing import Any

import jax
import optax

from optax_largebatch.params.leaves import is_spec
from optax_largebatch.params.owners import unboxed
from optax_largebatch.params.paths import is_box, is_function
from optax_largebatch.wrappers.inner import check_inner


def with_partition_specs(
    inner: optax.GradientTransformation,
    partition_specs: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""The same optimizer, which knows how the parameters are split between devices.

    Use it where a trainer calls `optimizer.update(gradients, state, params)` itself and passes
    nothing else: Flax's `TrainState`, `nnx.Optimizer`, MaxText, Levanter, axlearn. It passes
    `partition_specs` to `update` on every call, see `chain`. What a call passes itself takes
    precedence.

    On a mesh, devices then exchange the norms of all parameters as one vector, and Muon exchanges
    matrices without gathering them. The numbers stay the same.

    Args:
        inner: the optimizer, from this library or wrapped by any other.
        partition_specs: the parameters, where they lie on a mesh, or their shapes with shardings;
            or a tree of `jax.sharding.PartitionSpec` or `NamedSharding` like them, or a prefix of
            one; also in the boxes of Flax that `nnx.get_partition_spec` and the like leave around
            them. `PartitionSpec` needs the mesh around the step (`jax.set_mesh`), `NamedSharding`
            has it. A function of the parameters, if the tree is not known yet: it is called when
            the step is traced.

    Returns:
        The optimizer, with the state of `inner`.

    Raises:
        TypeError: `inner` is no optimizer, or an entry of `partition_specs` has no spec.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from optax_largebatch import muon, with_partition_specs
        >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
        >>> params = {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}
        >>> params["kernel"] = jax.device_put(
        ...     params["kernel"], NamedSharding(mesh, PartitionSpec("fsdp")))
        >>> params["bias"] = jax.device_put(params["bias"], NamedSharding(mesh, PartitionSpec()))
        >>> optimizer = with_partition_specs(muon(0.02), params)
        >>> state = optimizer.init(params)
        >>> updates, state = jax.jit(optimizer.update)(params, state, params)
        >>> print(updates["bias"][:2].round(2))
        [-0.03 -0.03]
    """
    inner = check_inner(inner)
    if not is_function(partition_specs):
        partition_specs = _specs(partition_specs)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        if extra_args.get("partition_specs") is None:
            known = partition_specs
            if is_function(known):
                known = _specs(known(updates if params is None else params))
            extra_args["partition_specs"] = known
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _specs(partition_specs: Any) -> Any:
    """The tree without boxes around its specs, after checking that they are specs."""

    def spec_of(path: Any, node: Any) -> Any:
        spec = node if is_spec(node) else getattr(node, "sharding", None)
        if not is_spec(spec):
            kind = getattr(node, "aval", node)  # the type of an array
            raise TypeError(
                "partition_specs must be a tree of jax.sharding.PartitionSpec or NamedSharding, of "
                "arrays that have a NamedSharding, or a function of the parameters that returns "
                f"one; got {kind!r} at {jax.tree_util.keystr(path) or 'its root'}."
            )
        return spec

    specs = jax.tree_util.tree_map_with_path(spec_of, partition_specs, is_leaf=is_spec)
    return jax.tree.map(unboxed, specs, is_leaf=lambda x: is_spec(x) or is_box(x))
