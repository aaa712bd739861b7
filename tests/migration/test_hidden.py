"""Parameters that are hidden together, by one label for all of them."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb

PARAMS = {
    "encoder": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 2))},
}
LABELS = {"encoder": "slow", "head": "fast"}


def of_two(optimizer, encoder=None):
    """An optimizer for each of the two, or two of the same."""
    return optax.partition({"slow": encoder or optimizer, "fast": optimizer}, LABELS)


@pytest.mark.parametrize(
    "new",
    [lb.lamb(0.1), of_two(lb.lamb(0.1)), of_two(lb.lamb(0.1), optax.set_to_zero())],
    ids=["all in one", "two", "one is frozen now"],
)
def test_moments_of_two_labels(new):
    old = of_two(optax.adam(0.1))
    _, state = old.update(PARAMS, old.init(PARAMS), PARAMS)
    adopted = lb.adopt_state(new, PARAMS, state, old_optimizer=old)
    _, expected = new.update(PARAMS, new.init(PARAMS), PARAMS)
    for kind in ("mu", "nu", "count"):
        found, wanted = (
            [own for _, own in optax.tree.get_all_with_path(of, kind)] for of in (adopted, expected)
        )
        chex.assert_trees_all_close(found, wanted, rtol=1e-6)
    chex.assert_trees_all_equal_structs(adopted, expected)
    jax.jit(new.update)(PARAMS, adopted, PARAMS)


def test_frozen_before_and_trained_now():
    old = of_two(optax.adam(0.1), optax.set_to_zero())
    with pytest.raises(ValueError, match="state has no moments of 'encoder/bias'"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, old.init(PARAMS))


def test_another_structure_is_named():
    state = optax.adam(0.1).init(PARAMS | {"more": jnp.ones(2)})
    with pytest.raises(ValueError, match="the mu of state must have the tree structure of params"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state)
