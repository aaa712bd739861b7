"""What optimizers of JAX libraries do with stacks, shards and zeros, as docs/libraries.md says.

    python -m docs.compare_libraries

Runs those that are installed, on eight CPU devices. rollfast 1.3 and marin-levanter want a Python
from 3.12 on, and two environments, since they want different versions of optax.
"""

from collections.abc import Callable
import dataclasses
import importlib
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import optax_largebatch as lb

jax.config.update("jax_num_cpu_devices", 8)  # before the first array
RATE = 0.1
RATIOS = (0.62, 1.14, 1.66, 2.26, 2.08, 3.49, 4.73, 6.85)
"""The sizes of eight layers, the trust ratios of the picture of the front page."""
KEYS = jax.random.split(jax.random.key(0))
STACK = jax.random.normal(KEYS[0], (8, 64, 64)) * jnp.array(RATIOS)[:, None, None]
GRADIENT = jax.random.normal(KEYS[1], (8, 64, 64)) / STACK.std(axis=(1, 2), keepdims=True)
STACKED = lb.stacked_layers(
    lambda params: jax.tree.map(lambda x: 0 if x.ndim == 3 else None, params)
)

Optimizer = optax.GradientTransformation
Wrap = Callable[[jax.Array], Any]


def bare(array: jax.Array) -> Any:
    """The parameters of a library that takes any tree of arrays."""
    return {"kernel": array}


def linear(array: jax.Array) -> Any:
    """The same as a layer of Haliax, or a stack of such layers."""
    haliax = importlib.import_module("haliax")
    ends = haliax.Axis("In", array.shape[-2]), haliax.Axis("Out", array.shape[-1])
    layers = haliax.Axis("Layers", 8)
    if array.ndim == 2:
        return haliax.nn.Linear(haliax.named(array, ends), None, *ends)
    init = haliax.nn.Stacked.init(layers, haliax.nn.Linear)
    stack = jax.eval_shape(lambda: init(*ends, key=jax.random.split(KEYS[0], 8), use_bias=False))
    of_all = haliax.nn.Linear(haliax.named(array, (layers, *ends)), None, *ends)
    return dataclasses.replace(stack, stacked=of_all)


def of_rollfast(axis: str | None = None) -> Optimizer:
    """Muon with a hyperball, told which axes of a stack are rows and columns."""
    numbers = importlib.import_module("rollfast.optim.muon").MuonDimensionNumbers(-2, -1)
    return importlib.import_module("rollfast").muon_hyperball(
        RATE,
        muon_weight_dimension_numbers=lambda x: jax.tree.map(lambda _: numbers, x),
        hyperball_mask=lambda x: jax.tree.map(lambda _: True, x),
        axis_name=axis,
    )


def of_levanter(_: str | None = None) -> Optimizer:
    """The chain of its configuration `muonH`, without the parts for other parameters."""
    return importlib.import_module("levanter.optim.muonh").scale_with_muonh(learning_rate=RATE)


def of_optax(_: str | None = None) -> Optimizer:
    """Muon, told the same."""
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return optax.contrib.muon(
        RATE, muon_weight_dimension_numbers=lambda x: jax.tree.map(lambda _: numbers, x)
    )


def ours(optimizer: Optimizer) -> Callable[..., Optimizer]:
    """One of this library, told which axis is split."""
    return lambda axis=None: lb.with_partition_specs(optimizer, P(axis)) if axis else optimizer


OPTIMIZERS: dict[str, tuple[str, Callable[..., Optimizer], Wrap]] = {
    "optax.lamb": ("optax", lambda _=None: optax.lamb(RATE), bare),
    "optax.contrib.muon": ("optax", of_optax, bare),
    "rollfast.muon_hyperball": ("rollfast", of_rollfast, bare),
    "Levanter's muonH": ("marin-levanter", of_levanter, linear),
    "lb.lamb": ("optax-largebatch", ours(lb.lamb(RATE, stacked=STACKED)), bare),
    "lb.muon": ("optax-largebatch", ours(lb.muon(RATE, stacked=STACKED)), bare),
    "lb.muonh": ("optax-largebatch", ours(lb.muonh(RATE, stacked=STACKED)), bare),
}
"""The library of each, the optimizer by the name of the axis that is split, and its parameters."""


def step(optimizer: Optimizer, wrap: Wrap) -> Callable[..., jax.Array]:
    """The first step as a compiled function of parameters and gradients."""

    def first(params: jax.Array, gradient: jax.Array) -> jax.Array:
        state = optimizer.init(wrap(params))
        updates, _ = optimizer.update(wrap(gradient), state, wrap(params))
        return jax.tree.leaves(updates)[0]

    return jax.jit(first)


def steps_of_layers(first: Callable[..., jax.Array]) -> str:
    """The least and the greatest step in a stack, over that of the layer in its own array."""
    alone = np.stack([first(x, g) for x, g in zip(STACK, GRADIENT, strict=True)])
    over, of_each = (np.linalg.norm(x, axis=(1, 2)) for x in (first(STACK, GRADIENT), alone))
    return f"{(over / of_each).min():.2f} to {(over / of_each).max():.2f} times the right one"


def distance_in_shards(first: Callable[..., jax.Array], alone: Callable[..., jax.Array]) -> str:
    """How far a step is from that of one device, over its length, if rows are split."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    split = jax.jit(jax.shard_map(first, mesh=mesh, in_specs=P("rows"), out_specs=P("rows")))
    rows = [x[:, :8].reshape(64, 64) for x in (STACK, GRADIENT)]
    right = alone(*rows)
    return f"{np.linalg.norm(split(*rows) - right) / np.linalg.norm(right):.1g} of its length"


def main() -> None:
    """A line for each optimizer whose library is installed."""
    for name, (library, optimizer, wrap) in OPTIMIZERS.items():
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            version = lb.__version__ if library == "optax-largebatch" else None
        if version is None:
            print(f"{name}: not installed")
            continue
        first = step(optimizer(), wrap)
        in_shards = "fails"
        if wrap is bare:
            in_shards = distance_in_shards(step(optimizer("rows"), wrap), first)
        of_zeros = first(jnp.zeros((64, 64)), GRADIENT[0])
        print(
            f"{name} ({library} {version})",
            f"stack of eight: steps {steps_of_layers(first)}",
            f"rows in shard_map, from one device: {in_shards}",
            f"a matrix of zeros: {'NaN' if jnp.isnan(of_zeros).any() else 'finite'}",
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
