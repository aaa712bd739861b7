"""Runs of an optimizer on a small network, in float64, and their comparison with a formula."""

import jax
import numpy as np

from tests.helpers import trajectory

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
    """The weights after each step."""
    return jax.device_get(trajectory(optimizer, weights, gradients))


def assert_same(ours, theirs, tolerance=1e-11):
    """Checks each leaf at every step, to a fraction of the leaf's largest weight."""
    for name, leaf in theirs.items():
        np.testing.assert_allclose(
            ours[name],
            leaf,
            rtol=0,
            atol=tolerance * np.abs(leaf).max(initial=0),
            equal_nan=False,
            err_msg=name,
        )


def difference(one, other):
    """The largest difference of two runs, each leaf's over its largest weight."""
    return max(np.abs(one[name] - other[name]).max() / np.abs(one[name]).max() for name in one)
