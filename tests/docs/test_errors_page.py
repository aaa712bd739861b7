"""The messages that are headings of the page on errors are those of the package."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb
from tests.size import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text()
PARAMS = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
LAYERS = {"layers": {"kernel": jnp.ones((4, 8, 8))}}
MATRIX = {"kernel": jnp.ones((8, 16))}
HEADS = {"q_proj": {"kernel": jnp.ones((8, 2, 4))}, "down": {"kernel": jnp.ones((16, 8))}}
OUTPUTS_FIRST = {"up": {"weight": jnp.ones((16, 8)), "bias": jnp.ones(16)}}
LAMB = lb.lamb(0.1)


def step(optimizer, gradients=PARAMS, params=PARAMS, state=None, **extra_args):
    state = optimizer.init(params) if state is None else state
    return optimizer.update(gradients, state, params, **extra_args)[0]


def in_two_groups():
    groups = lb.param_groups(
        {"params": lb.matching("kernel"), "weight_decay": 0.1},
        {"params": lb.at_least_ndim(2), "learning_rate": 0.2},
    )
    lb.lamb(0.1, groups=groups).init(PARAMS)


def planned_for(params):
    run = lb.TunedRun("muonh", batch_size=8, total=800, learning_rate=0.1)
    lb.planned_optimizer(lb.batch_plan(8, total=800, run=run), params)


def half_of_the_bits():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    optax.inject_hyperparams(lb.lamb)(0.1).init(half)


def in_shard_map(function, specs):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0])


def unreduced():
    def of_one_device(params, scale):
        return step(LAMB, jax.tree.map(lambda leaf: leaf * scale, params), params)

    in_shard_map(of_one_device, (P(), P("data")))(PARAMS, jnp.arange(8.0))


def stacked_in_shard_map():
    optimizer = lb.lamb(0.1, stacked={"layers/": 0})
    in_shard_map(lambda params: step(optimizer, params, params), (P(None, "data"),))(LAYERS)


def on_two_automatic_axes():
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    matrix = jax.device_put(MATRIX, NamedSharding(mesh, P("fsdp", "tensor")))
    step(lb.muon(0.02), matrix, matrix)


def of_other_shapes():
    narrow = PARAMS | {"kernel": jnp.ones((8, 1))}
    step(LAMB, state=LAMB.init(narrow))


def of_one_block():
    stacking, whole = lb.lamb(0.1, stacked={"layers/": 0}), lb.lamb(0.1, stacked={})
    step(stacking, LAYERS, LAYERS, whole.init(LAYERS))


def of_copies():
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), LAMB.init(PARAMS))
    lb.trust_ratios(LAMB, copies, PARAMS)


def adopted_from(old):
    lb.adopt_state(LAMB, PARAMS, old.init(PARAMS), old_optimizer=old)


def adopted_too_early():
    accumulated = lb.accumulate_gradients(optax.adam(0.1), every=4)
    _, state = accumulated.update(PARAMS, accumulated.init(PARAMS), PARAMS)
    lb.adopt_state(lb.accumulate_gradients(LAMB, every=4), PARAMS, state)


def adopted_from_frozen():
    labels = {"kernel": "trained", "bias": "frozen"}
    old = optax.partition({"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels)
    lb.adopt_state(LAMB, PARAMS, old.init(PARAMS))


def adopted_from_muon():
    lb.adopt_state(optax.adamw(0.1), MATRIX, lb.muon(0.1).init(MATRIX))


RAISED = {
    "the pattern ... matches no parameter": lambda: lb.lamb(
        0.1, weight_decay_mask=~lb.matching("beta")
    ).init(PARAMS),
    "weight_decay_mask: ... selects no parameter": lambda: lb.lamb(
        0.1, weight_decay_mask=lb.at_least_ndim(3)
    ).init(PARAMS),
    "weight_decay_mask must be None (every parameter), a rule": lambda: lb.lamb(
        0.1, weight_decay_mask=False
    ),
    "matching(...) is neither true nor false": lambda: (
        lb.matching("kernel") and lb.at_least_ndim(2)
    ),
    "learning_rate: what the schedule returns must be a scalar": lambda: step(
        lb.lamb(lambda count: jnp.array([0.1, 0.2, 0.3, 0.4]))
    ),
    "batch_scale must be a Python integer": lambda: optax.inject_hyperparams(lb.lbsgd)(
        0.1, batch_scale=4
    ).init(PARAMS),
    "b1 must be in [0, 1)": lambda: lb.lamb(0.1, b1=1.0),
    "groups: the parameter ... is in two groups": in_two_groups,
    "batch_size must be one of the batch sizes at which": lambda: lb.recipes.get(
        "bert-large/lamb/mlperf", 65536
    ),
    "UserWarning: muonh: ... have more than two axes and may be matrices": lambda: lb.muonh(
        0.1
    ).init(HEADS),
    "UserWarning: muon: ... seem to have their outputs first, and rows are taken for inputs": (
        lambda: lb.muon(0.1).init(OUTPUTS_FIRST)
    ),
    "parameters look like stacks of layers, such as": lambda: lb.muonh(0.1).init(
        {"layers": {"kernel": jnp.ones((4, 8, 8)), "bias": jnp.ones((4, 8))}}
    ),
    "muonh moves matrices, and none of the ... parameters is one": lambda: lb.muonh(0.1).init(
        jnp.ones(8)
    ),
    "head must be given: no name says where they are": lambda: planned_for(
        [{"kernel": jnp.ones((8, 9))}, {"kernel": jnp.ones((9, 3))}]
    ),
    "params must be given to `update`": lambda: LAMB.update(PARAMS, LAMB.init(PARAMS)),
    "params must hold floating point or complex arrays": lambda: LAMB.init(
        {"step": jnp.zeros((), int)}
    ),
    "clip_by_value takes no complex numbers": lambda: lb.clip_by_value(1.0).init(jnp.ones(1) * 1j),
    "params must hold at least one array": lambda: LAMB.init({}),
    "updates must have the shapes of the parameters": lambda: step(
        LAMB, PARAMS | {"kernel": jnp.ones((4, 8))}
    ),
    "updates must have the tree structure of the parameters": lambda: step(
        LAMB, {"kernel": jnp.ones((8, 4))}
    ),
    "b1 must be a number in [0, 1) of at least 32 bits": half_of_the_bits,
    "updates must be reduced over the mesh axis": unreduced,
    "partition_specs must be given to `update`": stacked_in_shard_map,
    "UserWarning: The update works on whole matrices on a mesh with the axes": (
        on_two_automatic_axes
    ),
    "partition_specs names the mesh axis ... and there is no such axis here": lambda: step(
        LAMB, partition_specs={"kernel": P("data"), "bias": P()}
    ),
    "state must be that of": lambda: step(LAMB, state=lb.lars(0.1).init(PARAMS)),
    "the state's mu has the shape": of_other_shapes,
    "the state's trust_ratios must have an entry for each block": of_one_block,
    "the state's trust_ratios has the shape ... with an axis for the copies": of_copies,
    "optimizer has no trust ratios": lambda: lb.trust_ratios(
        lb.eve(0.1), lb.eve(0.1).init(PARAMS), PARAMS
    ),
    "old_optimizer must keep the moments that optimizer keeps": lambda: adopted_from(
        optax.adamax(0.1)
    ),
    "state must be between two macro-batches": adopted_too_early,
    "state has no moments of": adopted_from_frozen,
    "state has a momentum of Muon of ... and optimizer needs moments of Adam": adopted_from_muon,
}


def test_every_heading_is_here():
    messages = PAGE.partition("## Silent problems")[0]
    assert re.findall(r"^### (.+)$", messages, re.MULTILINE) == list(RAISED)


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="types of jax.shard_map")
@pytest.mark.parametrize("heading", RAISED)
def test_is_raised(heading):
    kind = UserWarning if heading.startswith("UserWarning") else (TypeError, ValueError)
    parts = map(re.escape, heading.removeprefix("UserWarning: ").split("..."))
    with (
        pytest.raises(kind, match=".*".join(parts)),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        RAISED[heading]()
