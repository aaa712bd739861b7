"""A sum of branches is the sum of what they return one by one."""

import chex
import jax
import jax.numpy as jnp

import optax_largebatch as lb
from optax_largebatch.engine.requests import Leaf
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.params.leaves import leaves_of
from tests.helpers import first_step

PARAMS = {"kernel": jnp.linspace(-1.0, 2.0, 6).reshape(2, 3), "gain": jnp.asarray(2.0)}
GRADS = jax.tree.map(lambda x: jnp.cos(3 * x), PARAMS)


def branches():
    return [
        lb.chain(lb.accumulate_momentum(0.5), lb.scale_by_trust_ratio()),
        lb.normalize_by_block_norm(),
        lb.chain(lb.clip_by_global_norm(0.5), lb.add_decayed_weights(0.1)),
    ]


def test_is_the_sum_of_its_branches():
    together, apart = lb.sum_of(*branches()), branches()
    state, states = together.init(PARAMS), [branch.init(PARAMS) for branch in apart]
    for _ in range(2):
        updates, state = together.update(GRADS, state, PARAMS)
        results = [
            branch.update(GRADS, own, PARAMS) for branch, own in zip(apart, states, strict=True)
        ]
        states = [own for _, own in results]
        expected = jax.tree.map(lambda *terms: sum(terms), *(update for update, _ in results))
        chex.assert_trees_all_close(updates, expected, rtol=1e-6)
        chex.assert_trees_all_close(state, tuple(states), rtol=1e-6)


def test_branches_ask_for_their_norms_together():
    link = leaf_transform_of(lb.sum_of(lb.scale_by_trust_ratio(), lb.normalize_by_block_norm()))
    leaves = leaves_of("params", PARAMS)
    at = Leaf(
        leaves.arrays[1],
        leaves.arrays[1],
        link.split(link.init(PARAMS), leaves)[1],
        link.scalars(link.init(PARAMS)),
        link.choices(leaves)[1],
        stacked=(),
    )
    request = next(link.leaf(jnp.ones((2, 3)), at))
    assert len(request.statistics) == 3


def test_a_sum_in_a_sum_in_a_chain():
    inner = lb.sum_of(lb.clip_by_value(None), lb.clip_by_value(None))
    transform = lb.chain(lb.sum_of(inner, lb.clip_by_value(None)), lb.scale_by_learning_rate(1.0))
    updates, _ = first_step(transform, GRADS, PARAMS)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -3 * g, GRADS), rtol=1e-6)
