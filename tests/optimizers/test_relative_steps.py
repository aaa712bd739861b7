"""The laws of the optimizers whose steps are relative to the size of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.golden import learned_gradient
from tests.helpers import compiled, given, trained
from tests.optimizers.registry import named
from tests.trajectories import assert_same

SHAPES = {"matrix": (6, 5), "cube": (4, 3, 2), "bias": (8,), "few": (3,), "column": (7, 1)}
OPTIMIZERS = {
    "cain": lambda c: lb.cain(0.05, eps=0.0, rms_eps=1e-3 * c, param_max=2.0 * c),
    "learned_gradient": lambda c: learned_gradient(
        0.05, eps=0.0, period=3, param_min_rms=0.1 * c, param_max_rms=1.2 * c
    ),
    "scaled_adam": lambda c: lb.scaled_adam(
        0.05, eps=0.0, clipping_scale=0.6, param_min_rms=0.1 * c, param_max_rms=1.2 * c
    ),
}
"""Each with floors and ceilings that are reached, in units of `c`."""


def network(shapes):
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()}
    params["bias"] *= 0
    gradients = {
        name: jnp.asarray(random.normal(size=(30, *shape)) + 0.5) for name, shape in shapes.items()
    }
    return params, gradients


@pytest.mark.parametrize("name", named(OPTIMIZERS))
def test_units_of_the_parameters_and_of_the_loss_do_not_matter(name, x64):
    """Scaling `p -> c p` and so `g -> g / c` scales the trajectory; `g -> k g` changes nothing."""
    params, gradients = network(SHAPES | {"scalar": ()})
    c, k = 0.37, 1e3

    @compiled
    def run(c, k):
        own_params = jax.tree.map(lambda p: c * p, params)
        own_gradients = jax.tree.map(lambda g: k / c * g, gradients)
        return trained(OPTIMIZERS[name](c), own_params, given, own_gradients)[1]

    theirs = run(1.0, 1.0)
    assert_same(run(1.0, k), theirs, 1e-9)
    theirs = jax.tree.map(lambda p: c * p, theirs)
    del theirs["scalar"]  # it has no size, and moves by the learning rate
    assert_same(run(c, 1.0), theirs, 1e-9)


@pytest.mark.parametrize(
    "optimizer",
    [
        lb.cain(0.03, rms_eps=1e-3),
        learned_gradient(0.03, param_min_rms=1e-3),
        lb.scaled_adam(0.03, param_min_rms=1e-3),
    ],
)
def test_a_zero_bias_grows_from_the_floor(optimizer):
    """It takes about `log(1 / floor) / lr` steps to a size of 1; here 230."""
    to_one = lambda bias, _: bias - 1.0  # noqa: E731
    run = compiled(lambda bias: trained(optimizer, bias, to_one, jnp.arange(800))[1][:, 0])
    path = run(jnp.zeros(8))
    assert float(path[2]) < 1e-3
    assert float(jnp.max(path[:30])) < 0.05
    assert abs(float(path[-1]) - 1) < 0.1
