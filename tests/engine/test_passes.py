"""Passes give the numbers of the plain reading of a link, and leave nothing behind."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import passes
from optax_largebatch.engine.link import Leaf, Link, Stored
from optax_largebatch.engine.reductions import cpu as sums
from optax_largebatch.engine.reductions import folds, tiles
from optax_largebatch.engine.transformation import link_of, transformation
from optax_largebatch.params.leaves import leaves_of
from tests.optimizers.registry import named

KERNELS = lb.matching("kernel")
GROUPS = lb.param_groups(
    {"params": lb.matching("conv"), "weight_decay": 0.5, "grad_centralization": True}
)
OPTIMIZERS = {
    "lamb": lb.lamb(0.1, weight_decay=0.1, trust_ratio_mask=KERNELS),
    "lamb, clipped": lb.lamb(0.1, weight_decay=0.1, max_grad_norm=0.5, groups=GROUPS),
    "lamb, stacked": lb.lamb(0.1, stacked=lb.stacked_layers({"conv": (0, 1)})),
    "lans, stacked": lb.lans(
        0.1, weight_decay=0.5, stacked=lb.stacked_layers({"conv": 0, "kernel": 1})
    ),
    "lamb, bfloat16 moments": lb.lamb(0.1, mu_dtype="bfloat16", nu_dtype="bfloat16"),
    "lans": lb.lans(0.1, weight_decay=0.1, clip_gradient=0.3, trust_ratio_mask=KERNELS),
    "lans, sequential": lb.lans(0.1, weight_decay=0.1, order="sequential"),
    "lars": lb.lars(0.1, 0.1, KERNELS, nesterov=True),
    "lars, update": lb.lars(0.1, 0.1, denominator="update", momentum_of="directions"),
    "larc": lb.larc(0.1, 0.1, groups=GROUPS),
    "cain": lb.cain(0.1),
    "learned_gradient": lb.learned_gradient(0.1, lr_est_period=1),
    "scaled_adam": lb.scaled_adam(0.1, clipping_scale=1.0),
    "two rounds and two clips": lb.chain(
        lb.scale_by_trust_ratio(trust_ratio_mask=KERNELS),
        lb.clip_by_global_norm(0.5),
        lb.nesterov_split(lb.chain(lb.accumulate_momentum(0.5), lb.scale_by_trust_ratio())),
        lb.accumulate_momentum(0.9),
        lb.clip_by_global_norm(0.25),
    ),
    "a global norm in a branch": lb.nesterov_split(
        lb.chain(lb.clip_by_global_norm(0.1), lb.scale_by_trust_ratio())
    ),
}
PARAMS = {
    "dense": {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.zeros(3)},
    "dense_too": {"kernel": jnp.arange(-3.0, 3.0).reshape(2, 3), "bias": jnp.ones(3)},
    "conv": jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 2, 2),
    "gain": jnp.asarray(2.0),
}


def next_request(program, answer):
    """On to the next request for norms; what is stored is answered at once."""
    request = program.send(answer)
    while isinstance(request, Stored):
        kept = request.array.astype(request.dtype or request.array.dtype)
        request = program.send(kept.astype(request.array.dtype))
    return request


def statistic(asked):
    """The norm, sum or mean of every slice along the axes that are kept."""
    function = {
        "norm": jnp.linalg.norm,
        "rms": lambda x: jnp.sqrt(jnp.mean(jnp.square(x))),
        "sum": jnp.sum,
        "mean": jnp.mean,
    }[asked.kind]
    if not asked.kept:
        return function(asked.array.ravel())
    first = jnp.moveaxis(asked.array, asked.kept, range(len(asked.kept)))
    lengths = first.shape[: len(asked.kept)]
    each = jax.vmap(function)(first.reshape(math.prod(lengths), -1))
    shape = [n if axis in asked.kept else 1 for axis, n in enumerate(asked.array.shape)]
    return each.reshape(shape)


def plainly(link, updates, state, params):
    """One step of a link as it reads: every program once, in step with the others."""
    leaves = leaves_of("params", params)
    parts = jax.tree.map(
        lambda x: x.astype("float32") if jnp.issubdtype(x.dtype, jnp.floating) else x,
        link.split(state, leaves),
    )
    scalars, choices = link.scalars(state), link.choices(leaves)
    columns = zip(jax.tree.leaves(updates), leaves.arrays, parts, choices, strict=True)
    programs = [
        link.leaf(gradient, Leaf(param, param, part, scalars, choice))
        for gradient, param, part, choice in columns
    ]
    results, requests = {}, {}
    answers = dict.fromkeys(range(len(programs)))
    while answers:
        for index, answer in answers.items():
            try:
                requests[index] = next_request(programs[index], answer)
            except StopIteration as end:
                results[index] = end.value
        of_all = all(request.of_all_leaves for request in requests.values())
        answered = {
            index: request
            for index, request in requests.items()
            if of_all or not request.of_all_leaves
        }
        norm = optax.tree.norm([request.statistics[0].array for request in requests.values()])
        answers = {
            index: [norm] if of_all else [statistic(x) for x in request.statistics]
            for index, request in answered.items()
        }
        for index in answered:
            del requests[index]
    new_updates, new_parts = zip(*(results[index] for index in sorted(results)), strict=True)
    return leaves.rebuild(list(new_updates)), link.join(state, list(new_parts), leaves)


@pytest.fixture(params=["few cores", "many cores"])
def one_cpu(request, monkeypatch):
    monkeypatch.setattr(passes, "on_one_cpu", lambda: True)
    monkeypatch.setattr(sums, "has_few_cores", lambda: request.param == "few cores")
    return request.param


@pytest.fixture(params=["several devices", "few", "small leaves", "folds", "tiles", "many cores"])
def way(request, monkeypatch):
    """The ways in which passes run: what they do depends on where they are."""
    monkeypatch.setattr(passes, "on_one_cpu", lambda: request.param != "several devices")
    monkeypatch.setattr(sums, "has_few_cores", lambda: request.param == "tiles")
    if request.param != "few":
        monkeypatch.setattr(sums, "LEAST_OF_YNN", 4)
    if request.param == "folds":
        monkeypatch.setattr(sums, "LEAST_FOLDED", 4)
        monkeypatch.setattr(folds, "LAYERS", range(2, 4))
        monkeypatch.setattr(folds, "WIDTH", 2)
        monkeypatch.setattr(passes, "MOST_OF_A_GROUP", 20)
    if request.param in ("tiles", "many cores"):
        monkeypatch.setattr(sums, "LEAST_CUT", 5)
        monkeypatch.setattr(sums, "LEAST_SPLIT", 5)
        monkeypatch.setattr(tiles, "MOST_ELEMENTS", 5)
        monkeypatch.setattr(tiles, "TILES_OF_A_TURN", 1)
        monkeypatch.setattr(tiles, "ALIGNMENT", 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", named(OPTIMIZERS))
def test_equals_the_plain_reading(name):
    optimizer = OPTIMIZERS[name]
    link = link_of(optimizer)
    step = jax.jit(lambda *args: optimizer.update(*args))
    plain_step = jax.jit(lambda *args: plainly(link, *args))
    state = plain_state = optimizer.init(PARAMS)
    for index in range(4):
        gradients = jax.tree.map(lambda x, i=index: jnp.cos(3 * x + i), PARAMS)
        updates, state = step(gradients, state, PARAMS)
        expected, plain_state = plain_step(gradients, plain_state, PARAMS)
        chex.assert_trees_all_close(updates, expected, rtol=6e-6, atol=5e-7)
        chex.assert_trees_all_close(state, plain_state, rtol=6e-6, atol=5e-7)


@pytest.mark.usefixtures("one_cpu")
def test_an_empty_leaf_may_come_first():
    params = {"a": jnp.zeros(0), "b": jnp.ones(3)}
    optimizer = lb.lamb(0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["b"], -0.1, rtol=1e-5)


def compiled_step(optimizer, params):
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (params, jax.eval_shape(optimizer.init, params), params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


LARGE = {f"kernel_{index}": jax.ShapeDtypeStruct((2048, 2048), "float32") for index in range(8)}
BYTES = 8 * 4 * 2048 * 2048


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA keeps one leaf")
@pytest.mark.parametrize("name", ["lamb", "lans", "lars", "larc"])
def test_temporaries_are_a_hundredth_of_the_parameters(name):
    """A direction that is kept for one of the leaves alone would be a third of the parameters."""
    optimizer = getattr(lb, name)(1e-3, weight_decay=0.01)
    memory = compiled_step(optimizer, LARGE).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * BYTES
    buffers = {"lamb": 3, "lans": 3, "lars": 2, "larc": 2}[name]
    assert memory.alias_size_in_bytes >= buffers * BYTES


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="as XLA counts them today")
@pytest.mark.parametrize(
    ("name", "passes_at_all", "outside_of_loops"),
    [("lamb", 56, 41), ("lans", 76, 46), ("lars", 36, 29)],
)
def test_bytes_that_a_step_moves(name, passes_at_all, outside_of_loops, one_cpu):
    """For each float32 parameter, added over all passes; one more pass would read 8 more.

    Of a loop over tiles XLA counts one turn.
    """
    step = compiled_step(getattr(lb, name)(1e-3, weight_decay=0.01), LARGE)
    most = outside_of_loops if one_cpu == "few cores" else passes_at_all
    assert step.cost_analysis()["bytes accessed"] / (BYTES / 4) <= most + 0.5


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("name", ["lamb", "lans"])
def test_a_pass_is_merged_inside(name):
    """`jnp.where` is a jitted function; each of them would be a call, and no part of a kernel."""
    program = compiled_step(getattr(lb, name)(1e-3, weight_decay=0.01), LARGE).as_text()
    calls = re.findall(r" call\(.*to_apply=%?(\w+)", program)
    assert calls
    assert not [name for name in calls if "where" in name]


def test_leaves_of_one_signature_are_traced_once():
    traced = []

    def noting(update, at):
        traced.append(update.shape)
        return update, at.state
        yield

    link = Link(init=lambda params: optax.EmptyState(), leaf=noting)
    optimizer = transformation(link)
    params = {f"leaf_{index}": jnp.ones((2, 3)) for index in range(20)} | {"other": jnp.ones(3)}
    jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert len(traced) <= 2 * 2  # once for the plan and once for the pass, for each of two shapes
    assert set(traced) == {(2, 3), (3,)}


def test_bfloat16_leaves_and_moments_in_one_network():
    params = {"kernel": jnp.ones((4, 4), "bfloat16"), "scale": jnp.ones(4)}
    optimizer = lb.lamb(0.1, mu_dtype="bfloat16")
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert [x.dtype for x in jax.tree.leaves(updates)] == ["bfloat16", "float32"]
    np.testing.assert_allclose(np.asarray(updates["kernel"], "float32"), -0.1, rtol=1e-2)
    np.testing.assert_allclose(updates["scale"], -0.1, rtol=1e-5)
