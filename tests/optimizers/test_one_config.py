"""What several algorithms have a place for is called the same in all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

PARAMS = {
    "bias": jnp.array([0.3, -0.2, 0.1]),
    "kernel": jnp.linspace(-3.0, 5.0, 24).reshape(8, 3),
    "small": jnp.array([1e-3, 2e-3]),
}
GRADIENTS = jax.tree.map(jnp.cos, PARAMS)
CONFIG = {
    "learning_rate": optax.linear_schedule(0.1, 0.0, 10),
    "weight_decay": 0.01,
    "weight_decay_mask": ~lb.matching("(^|/)bias$"),
    "trust_ratio_mask": ~lb.matching("(^|/)bias$"),
    "groups": lb.param_groups({"params": lb.matching("(^|/)small$"), "learning_rate_scale": 0.5}),
}
"""A trainer's, without the bounds, which stand for a ratio of each optimizer's own size."""

OPTIMIZERS = {"lamb": lb.lamb, "lans": lb.lans, "lars": lb.lars}


def first_step(name, **changes):
    """The updates of the first step, and all trust ratios: of LANS those of both directions."""
    optimizer = OPTIMIZERS[name](**CONFIG | changes)
    updates, state = jax.jit(optimizer.update)(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    ratios = [r for _, r in optax.tree.get_all_with_path(state, "trust_ratios")]
    assert len(ratios) == (2 if name == "lans" else 1)
    return updates, ratios


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learning_rate_scale(name):
    """Half of the schedule that all follow, and of what a group has itself."""
    scaled, _ = first_step(name)
    whole, _ = first_step(name, groups=None)
    np.testing.assert_array_equal(scaled["small"], 0.5 * whole["small"])
    np.testing.assert_array_equal(scaled["kernel"], whole["kernel"])
    for own in (0.3, lambda step: 0.3):
        group = {
            "params": lb.matching("(^|/)small$"),
            "learning_rate": own,
            "learning_rate_scale": 0.5,
        }
        updates, _ = first_step(name, groups=lb.param_groups(group))
        np.testing.assert_allclose(updates["small"], 1.5 * whole["small"], rtol=1e-6)
