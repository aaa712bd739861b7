"""What many tests do: draw a network, lay it out on a mesh, and train it."""

import jax
from jax.sharding import AxisType, NamedSharding
import numpy as np
import optax

import optax_largebatch as lb


def drawn(shapes, dtype="float32", seed=0):
    """For each name an array of normal numbers."""
    rng = np.random.default_rng(seed)
    # Of a number from jax each shape would be a program to compile.
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return jax.device_put(arrays)


def compiled(function, **settings):
    """The compiler need not optimise what runs so briefly."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **settings)


def first_step(optimizer, gradients, params, **extra_args):
    """The updates and the state of a first step."""
    return optimizer.update(gradients, optimizer.init(params), params, **extra_args)


def trained(optimizer, params, gradients, over, state=None, **extra_args):
    """Parameters and state after a scan, and the parameters after each step.

    Args:
        optimizer: what makes updates of gradients.
        params: the parameters at first.
        gradients: a function of the parameters and of an element of `over`.
        over: what is scanned, such as the numbers of the steps.
        state: the state at first, by default that of `init`.
        **extra_args: for each `update`.
    """

    def step(carry, x):
        params, state = carry
        updates, state = optimizer.update(gradients(params, x), state, params, **extra_args)
        with jax.numpy_dtype_promotion("standard"):  # of optax
            params = optax.apply_updates(params, updates)
        return (params, state), params

    state = optimizer.init(params) if state is None else state
    return jax.lax.scan(step, (params, state), over)


def given(params, gradients):
    """For `trained`, where what is scanned are the gradients."""
    return gradients


def trajectory(optimizer, params, gradients):
    """The parameters after each step, of gradients with the steps on their first axis."""
    run = compiled(lambda params, gradients: trained(optimizer, params, given, gradients)[1])
    return run(params, gradients)


def mesh_of(kind=AxisType.Auto, **sizes):
    """A mesh, by the names and the sizes of its axes."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def shardings_on(mesh, specs):
    """The tree of specs with shardings in their places."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def shapes_on(arrays, shardings):
    """The shapes of arrays, each with its sharding."""
    return jax.tree.map(
        lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), arrays, shardings
    )


def state_on(mesh, optimizer, params):
    """The shapes of the state of parameters on a mesh, each with its sharding, and the layout."""
    layout = lb.optimizer_state_shardings(optimizer, params, mesh)
    return shapes_on(jax.eval_shape(optimizer.init, params), layout), layout
