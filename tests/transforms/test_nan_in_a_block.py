"""A block with a NaN has a trust ratio of NaN, and no other block has."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal
import pytest

import optax_largebatch as lb
from tests.helpers import drawn

STACKED = lb.stacked_layers({"layers": 0})
OPTIMIZERS = {
    "lamb": lb.lamb(0.1, stacked=STACKED),
    "lamb with bounds": lb.lamb(
        0.1, param_norm_bounds=(0.1, 10.0), trust_ratio_bounds=(0.5, 2.0), stacked=STACKED
    ),
    "lans": lb.lans(0.1, weight_decay=0.01, stacked=STACKED),
    "lars": lb.lars(0.1, stacked=STACKED),
    "lars by the update": lb.lars(0.1, 0.01, denominator="update", stacked=STACKED),
    "lars with the coefficient": lb.chain(
        lb.scale_by_lars(zero_ratio="coefficient", stacked=STACKED), lb.scale_by_learning_rate(0.1)
    ),
    "larc": lb.larc(0.1, stacked=STACKED),
    "larc without clipping": lb.larc(0.1, clip=False, stacked=STACKED),
    "lbsgd": lb.lbsgd(0.1, warmup_strategy="lars", stacked=STACKED),
}


def network(seed):
    tree = drawn({"bias": (4,), "layers": (3, 4, 4), "zero": (4, 2)}, seed=seed)
    return tree | ({"zero": jnp.zeros((4, 2))} if seed == 0 else {})


def ratios_and_updates(optimizer, params, gradients):
    updates, state = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    ratios = jax.tree.leaves(lb.trust_ratios(optimizer, state, params))
    return np.concatenate([np.ravel(x) for x in ratios]), updates


def broken(tree, name, value):
    """The tree with one bad element, in the second layer of a stack."""
    place = (1, 2, 2) if name == "layers" else 0
    return tree | {name: tree[name].at[place].set(value)}


@pytest.mark.parametrize("name", ["bias", "layers"])
@pytest.mark.parametrize("where", ["weights", "gradients"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_its_ratio_is_nan_and_the_others_stay(optimizer, where, name):
    params, gradients = network(0), network(1)
    expected, good = ratios_and_updates(OPTIMIZERS[optimizer], params, gradients)
    if where == "weights":
        params = broken(params, name, jnp.nan)
    else:
        gradients = broken(gradients, name, jnp.nan)
    found, updates = ratios_and_updates(OPTIMIZERS[optimizer], params, gradients)
    directions = 2 if optimizer == "lans" else 1
    assert np.sum(np.isnan(found)) == directions
    assert_array_equal(found[~np.isnan(found)], expected[~np.isnan(found)])
    for other in sorted({"bias", "layers", "zero"} - {name}):
        assert_array_equal(updates[other], good[other])
    if name == "layers":
        kept = np.array([0, 2])
        assert_array_equal(updates[name][kept], good[name][kept])


@pytest.mark.parametrize("optimizer", ["lamb", "lars", "larc"])
def test_a_nan_counts_more_than_a_zero(optimizer):
    """Weights of 0 have the ratio 1, unless their gradient is a NaN."""
    gradients = broken(network(1), "zero", jnp.nan)
    found, _ = ratios_and_updates(OPTIMIZERS[optimizer], network(0), gradients)
    assert np.isnan(found[-1])
