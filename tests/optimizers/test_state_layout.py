"""The layout of every optimizer's state: a change breaks old checkpoints, so it is a decision.

`python -m tests.optimizers.test_state_layout` writes the decision down.
"""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
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
    "a mask": {"weight_decay_mask": lb.excluding("bias"), "trust_ratio_mask": lb.excluding("bias")},
    "schedules": {
        "learning_rate": optax.linear_schedule(0.1, 0.0, 9),
        "weight_decay": optax.linear_schedule(0.1, 0.0, 9),
    },
    "no decay": {"weight_decay": 0.0},
    "clipping": {
        "clip_gradient": 1.0,
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
        assert like_a_parameter == any(f"['{leaf}']" in path for leaf in params), path


if __name__ == "__main__":
    layouts = {name: layout(CHECKPOINTED[name]()) for name in sorted(CHECKPOINTED)}
    FILE.write_text(json.dumps(layouts, indent=2) + "\n")
