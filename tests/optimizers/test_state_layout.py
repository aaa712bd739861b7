"""The layout of every optimizer's state: a change breaks old checkpoints, so it is a decision.

`python -m tests.optimizers.test_state_layout` writes the decision down.
"""

import json
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.owners import owners
from tests.optimizers.checkpointed import CHECKPOINTED, parameters
from tests.optimizers.registry import OPTIMIZERS

FILE = pathlib.Path(__file__).with_name("state_layouts.json")


def layout(optimizer):
    """For each array in the state of an optimizer its dtype and shape, by path."""
    leaves = jax.tree.leaves_with_path(jax.eval_shape(optimizer.init, parameters()))
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_is_what_was_decided(name):
    assert layout(CHECKPOINTED[name]()) == json.loads(FILE.read_text())[name]


def test_nothing_else_was_decided():
    assert list(json.loads(FILE.read_text())) == sorted(CHECKPOINTED)


OPTIONS = {
    "a mask": {"weight_decay_mask": ~lb.matching("bias"), "trust_ratio_mask": ~lb.matching("bias")},
    "schedules": {
        "learning_rate": optax.linear_schedule(0.1, 0.0, 9),
        "weight_decay": optax.linear_schedule(0.1, 0.0, 9),
    },
    "no decay": {"weight_decay": 0.0},
    "clipping": {
        "max_grad_norm": 1.0,
        "clipping_scale": 2.0,
        "param_norm_bounds": (0.1, 1.0),
        "trust_ratio_bounds": (0.1, 1.0),
    },
    "no clipping": {"clipping_scale": None},
    "groups": {"groups": lb.param_groups({"params": lb.matching("bias"), "learning_rate": 0.5})},
    "other numbers": {
        "nesterov": True,
        "momentum": 0.0,
        "b1": 0.0,
        "grad_averaging": False,
        "trust_ratio_eps": 1e-6,
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_does_not_depend_on_options(name, options):
    entry = OPTIMIZERS[name]
    changes = entry.known(**OPTIONS[options])
    if not changes:
        pytest.skip("it has no such option")
    without, with_options = entry.make(), entry.make(**changes)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        *(jax.eval_shape(optimizer.init, parameters()) for optimizer in (without, with_options))
    )


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_optax_reads_writes_and_maps_it(name):
    optimizer, params = CHECKPOINTED[name](), parameters()
    state = optimizer.init(params)
    later = optax.tree.set(state, count=jnp.int32(7))
    counts = [int(count) for _, count in optax.tree.get_all_with_path(later, "count")]
    assert set(counts) == {7}  # optax would miss a state that is held by one with a count
    marked = optax.tree.map_params(optimizer, lambda x: x + 1, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(marked, state)
    differ = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), marked, state)
    moved = {jax.tree_util.keystr(path): moves for path, moves in jax.tree.leaves_with_path(differ)}
    assert sum(moved.values()) >= len(params)
    for path, like_a_parameter in moved.items():
        of_axes = re.search(r"factors|matrices|covariances", path)  # those are of its axes
        of_one = any(f"['{leaf}']" in path for leaf in params) and not of_axes
        assert like_a_parameter == of_one, path


MAPPED = {
    # Of a partition, such as Muon, optax maps what is hidden, too.
    **{name: own.make for name, own in OPTIMIZERS.items() if not own.is_partition},
    "groups": lambda: lb.lamb(
        0.1, groups=lb.param_groups({"params": lb.matching("bias"), "learning_rate": 0.2})
    ),
    "masters": lambda: lb.master_weights(lb.lamb(0.1)),
    "a tree as mask": lambda: lb.lans(
        0.1, weight_decay_mask={"bias": False, "gain": False, "kernel": True}
    ),
    "a function of keys": lambda: lb.lars(
        0.1, weight_decay_mask=lambda params: {name: name == "kernel" for name in params}
    ),
    "a function of stacks": lambda: lb.accumulate_gradients(
        lb.cain(stacked=lb.stacked_layers(stacks)), every=2, stacked=lb.stacked_layers(stacks)
    ),
    "in optax.masked": lambda: optax.masked(
        lb.lamb(0.1, trust_ratio_mask={"bias": optax.MaskedNode(), "gain": False, "kernel": True}),
        {"bias": False, "gain": True, "kernel": True},
    ),
}


def stacks(params):
    return {"bias": None, "gain": None, "kernel": 0}


@pytest.mark.parametrize("name", MAPPED)
def test_optax_maps_it_beside_other_trees(name):
    """Each array like a parameter meets what stands for this parameter in the other tree."""
    optimizer, params = MAPPED[name](), parameters()
    state = optimizer.init(params)
    numbers = {"bias": 0, "gain": 1, "kernel": 2}
    mapped = optax.tree.map_params(
        optimizer,
        lambda _, number: number,
        state,
        numbers,
        transform_non_params=lambda _: None,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    of_parameters = [own for own in owners(state, params) if own is not None]
    found = [x for x in jax.tree.leaves(mapped) if not isinstance(x, optax.MaskedNode)]
    if name == "in optax.masked":
        found = [number for number in found if number]
    assert found == of_parameters


if __name__ == "__main__":
    layouts = {name: layout(CHECKPOINTED[name]()) for name in sorted(CHECKPOINTED)}
    FILE.write_text(json.dumps(layouts, indent=2) + "\n")
