"""`optimizer_state_shardings` for any transformation and any container of parameters.

The oracle is the type that each array gets from `init` where the axes of the mesh are explicit:
what is made like a parameter is split like it.
"""

import itertools
from typing import NamedTuple

import equinox as eqx
from flax import nnx
from flax.core import FrozenDict
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.helpers import mesh_of, shardings_on
from tests.optimizers.checkpointed import watched
from tests.optimizers.registry import OPTIMIZERS

pytestmark = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="explicit axes are jax 0.8")


class Pair(NamedTuple):
    first: object
    second: object


class Module(eqx.Module):
    first: object
    second: object
    name: str = eqx.field(static=True, default="layer")


class NnxModule(nnx.Module):
    def __init__(self, first, second):
        self.first = nnx.Param(first)
        self.second = nnx.data([nnx.Param(x) for x in jax.tree.leaves(second)])


SHAPES = [(8, 4), (8, 4), (8,), (8, 12)]
SPECS = [P("data", "tensor"), P(None, "tensor"), P("data"), P("data")]


def placed(mesh):
    """Four parameters that are split in different ways; all of one shape would be confused."""
    return jax.device_put([jnp.ones(shape) for shape in SHAPES], shardings_on(mesh, SPECS))


CONTAINERS = {
    "dict": lambda a, b, c, d: {"embed": a, "block": {"kernel": b, "bias": c, "out": d}},
    "tuple": lambda a, b, c, d: (a, (b, c, d)),
    "pair of arrays": lambda a, b, c, d: (a, c),
    "tuples of one": lambda a, b, c, d: ((a,), (b,), (c,), (d,)),
    "list": lambda a, b, c, d: [a, [b, c], d],
    "dict of tuples": lambda a, b, c, d: {"first": (a, b), "second": (c, d)},
    "NamedTuple": lambda a, b, c, d: Pair(a, Pair(b, (c, d))),
    "FrozenDict": lambda a, b, c, d: FrozenDict({"first": a, "second": {"x": b, "y": (c, d)}}),
    "nnx.State": lambda a, b, c, d: nnx.state(NnxModule(a, [b, c, d]), nnx.Param),
    "Equinox": lambda a, b, c, d: Module(a, Module((b, None), [c, d])),
    "array": lambda a, b, c, d: a,
}


def by_rank(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def first_subtree(params):
    """Labels of the children of the root: each speaks for all that is below it."""
    nodes, structure = jax.tree.flatten(params, is_leaf=lambda x: x is not params)
    return structure.unflatten(["trained"] + ["frozen"] * (len(nodes) - 1))


MATRIX = lb.at_least_ndim(2)
OF_OPTAX = {
    "adam": lambda params: optax.adam(0.1),
    "adamw, masked": lambda params: optax.adamw(0.1, mask=matrices),
    "adafactor": lambda params: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "sgd in MultiSteps": lambda params: optax.MultiSteps(
        optax.sgd(0.1, 0.9), 2
    ).gradient_transformation(),
    "inject_hyperparams": lambda params: optax.inject_hyperparams(optax.adam)(0.1),
    "apply_if_finite": lambda params: optax.apply_if_finite(optax.adam(0.1), 3),
    "masked by a tree": lambda params: optax.masked(optax.adam(0.1), matrices(params)),
    "masked by a function": lambda params: optax.masked(lb.lamb(0.1), matrices),
    "partition by leaves": lambda params: optax.partition(
        {"matrix": lb.lamb(0.1), "vector": optax.adam(0.1)}, by_rank
    ),
    "partition by a tree": lambda params: optax.partition(
        {"matrix": lb.lars(0.1), "vector": optax.set_to_zero()}, by_rank(params)
    ),
    "partition by subtrees": lambda params: optax.partition(
        {"trained": lb.lans(0.1), "frozen": optax.set_to_zero()}, first_subtree(params)
    ),
}
OURS = {
    **{name: lambda params, entry=entry: entry.make() for name, entry in OPTIMIZERS.items()},
    "groups": lambda params: lb.lamb(
        0.1, groups=lb.param_groups({"params": MATRIX, "learning_rate": 0.2})
    ),
    "a tree as mask": lambda params: lb.lamb(0.1, weight_decay_mask=matrices(params)),
    "a function as mask": lambda params: lb.lamb(
        0.1,
        weight_decay_mask=lambda params: jax.tree.map_with_path(
            lambda path, leaf: jax.tree_util.keystr(path) != "" and leaf.ndim > 1, params
        ),
    ),
    "a function of stacks": lambda params: lb.scaled_adam(
        0.1, stacked=lb.stacked_layers(lambda params: 0)
    ),
    "accumulated, masters": lambda params: lb.master_weights(
        lb.accumulate_gradients(lb.skip_bad_steps(lb.lamb(0.1)), every=2)
    ),
    "NorMuon": lambda params: optax.partition(
        {
            "matrix": lb.chain(lb.orthogonalize_momentum(), lb.normalize_neurons()),
            "vector": optax.adam(0.1),
        },
        by_rank,
    ),
    "noise": lambda params: watched(lb.lamb(0.1)),
}
ALL = OF_OPTAX | OURS


def entries_of(sharding):
    """A spec without the trailing None that say nothing; types leave out what is whole."""
    entries = [] if sharding is None else list(sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return entries


QUICK = {(name, "dict") for name in ALL}
QUICK |= {
    (name, container)
    for name in ("lamb", "cain", "muonh", "partition by leaves", "a function of stacks")
    for container in ("tuple", "tuples of one", "NamedTuple", "nnx.State")
}
CASES = slow_but(QUICK, itertools.product(ALL, CONTAINERS))
"""Every transformation in one container, and one of each kind in several."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*outputs first")
def test_it_is_what_the_types_say(case):
    name, container = case
    if name == "a tree as mask" and container == "array":
        pytest.skip("a single boolean is no tree")
    mesh = mesh_of(AxisType.Explicit, data=4, tensor=2)
    params = CONTAINERS[container](*placed(mesh))
    optimizer = ALL[name](params)
    with jax.numpy_dtype_promotion("standard"):
        shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
        with jax.set_mesh(mesh):
            state = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    for (path, own), leaf in zip(
        jax.tree.leaves_with_path(shardings), jax.tree.leaves(state), strict=True
    ):
        where = jax.tree_util.keystr(path)
        is_row = ".v_row" in where or ".v_col" in where  # of adafactor: small, and whole for that
        assert entries_of(own) == ([] if is_row else entries_of(leaf.sharding)), where


def test_of_lookahead():
    """Its optimizer has moments of the fast parameters only."""
    mesh = mesh_of(AxisType.Explicit, data=4, tensor=2)
    params = CONTAINERS["dict"](*placed(mesh))
    both = optax.LookaheadParams.init_synced(params)
    optimizer = optax.lookahead(optax.adam(0.1), sync_period=5, slow_step_size=0.5)
    shardings = lb.optimizer_state_shardings(optimizer, both, mesh)
    found = optax.tree.get(shardings, "mu")
    assert jax.tree.map(entries_of, found) == jax.tree.map(lambda x: entries_of(x.sharding), params)
