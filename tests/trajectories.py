"""Runs of an optimizer on a small network, in float64, and their comparison with a formula."""

import jax
import numpy as np
import optax

STEPS = 20


def network():
    """Weights, and gradients with the steps on their first axis.

    There are matrices, a kernel of a convolution, vectors, a leaf of one element and one of no
    axes. One leaf starts at zero and one has a gradient of zero; the norms differ much from leaf to
    leaf.
    """
    shapes = {
        "conv/kernel": (4, 3, 2, 2),
        "dense/bias": (3,),
        "dense/kernel": (5, 3),
        "gain": (1,),
        "norm/beta": (4,),
        "norm/gamma": (4,),
        "unused/kernel": (2, 3),
        "temperature": (),
    }
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape) for name, shape in shapes.items()}
    gradients = {name: random.normal(size=(STEPS, *shape)) for name, shape in shapes.items()}
    weights["norm/beta"] *= 0
    weights["dense/kernel"] *= 10
    gradients["unused/kernel"] *= 0
    gradients["conv/kernel"] *= 0.01
    return weights, gradients


def run(optimizer, weights, gradients):
    """The weights after each step. (The compiler need not optimise what runs so briefly.)"""

    def step(weights, state, gradients):
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    step = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    state = optimizer.init(weights)
    trajectory = []
    for t in range(STEPS):
        weights, state = step(weights, state, {name: g[t] for name, g in gradients.items()})
        trajectory.append(weights)
    return {name: np.stack([np.asarray(tree[name]) for tree in trajectory]) for name in weights}


def assert_same(ours, theirs, tolerance=1e-11):
    """Checks each leaf at every step, to a fraction of the leaf's largest weight."""
    for name, leaf in theirs.items():
        np.testing.assert_allclose(
            ours[name],
            leaf,
            rtol=0,
            atol=tolerance * np.abs(leaf).max(),
            equal_nan=False,
            err_msg=name,
        )


def difference(one, other):
    """The largest difference of two runs, each leaf's over its largest weight."""
    return max(np.abs(one[name] - other[name]).max() / np.abs(one[name]).max() for name in one)
