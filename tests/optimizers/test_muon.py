"""Muon: the numbers of optax, and what travels between devices."""

from collections import Counter
import functools
import re
import warnings

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine.matrices import side_by_side
from optax_largebatch.params import paths
from optax_largebatch.params.matrix_axes import check_axes
from optax_largebatch.transforms.orthogonalization.newton_schulz import newton_schulz
from tests import helpers
from tests.conftest import enable_x64
from tests.engine.steps import on_shards, since_types_know_meshes
from tests.helpers import drawn, first_step, mesh_of, shardings_on

SHAPES = {
    "bias": (5,),
    "conv": (3, 3, 4, 8),
    "high": (12, 8),
    "layers": (3, 8, 12),
    "square": (6, 6),
    "wide": (8, 12),
}
STACKED = lb.stacked_layers({"layers": 0})
CONVOLUTION = {"conv": ((0, 1, 2), 3)}

theirs = pytest.mark.skipif(
    not hasattr(optax.contrib, "MuonDimensionNumbers"), reason="optax 0.2.6 has it"
)


def network(dtype="float32"):
    return drawn(SHAPES, dtype)


def gradients_at(params, index):
    return jax.tree.map(lambda x: 0.3 * x + jnp.cos(3 * x + index), params)


def trained(optimizer, params, steps=50):
    indices = jnp.arange(steps, dtype=params["bias"].dtype)
    with jax.numpy_dtype_promotion("standard"):  # optax's is not strict
        run = jax.jit(lambda x: helpers.trained(optimizer, x, gradients_at, indices)[0][0])
        return run(params)


SETTINGS = {
    "plain": {},
    "of Adam's size": {"consistent_rms": 0.2},
    "masked": {
        "nesterov": False,
        "weight_decay_mask": lambda params: {name: name != "square" for name in SHAPES},
    },
    "three steps": {"ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 3},
    "spectral": {"preconditioning": "spectral"},
    "schatten": {"preconditioning": "schatten"},
    "aol": {"preconditioning": "aol"},
    "no epsilon": {"eps": 0.0},
}
RATE = optax.linear_schedule(0.02, 0.001, 50)


def numbers_of_optax():
    dimensions = optax.contrib.MuonDimensionNumbers
    matrix = dimensions()
    return {
        "bias": None,
        "conv": dimensions((0, 1, 2), 3),
        "high": matrix,
        "layers": dimensions(1, 2),
        "square": matrix,
        "wide": matrix,
    }


@theirs
@pytest.mark.parametrize(
    ("name", "said_by", "dtype"),
    [
        # Adam has an epsilon of its own in optax.
        *((name, "numbers", "float32" if name == "no epsilon" else "float64") for name in SETTINGS),
        ("plain", "rules", "float64"),
        ("plain", "rules", "float32"),
    ],
)
def test_equals_that_of_optax(name, said_by, dtype):
    """Rules give the same axes with any settings, and float32 the same but for rounding."""
    numbers, settings = numbers_of_optax(), {"weight_decay": 0.1, **SETTINGS[name]}
    axes = {"matrix_axes": numbers}
    if said_by == "rules":
        axes = {"matrix_axes": CONVOLUTION, "stacked": STACKED}
    with enable_x64(dtype == "float64"):
        ours = lb.muon(RATE, **axes, **settings)
        peer = optax.contrib.muon(RATE, muon_weight_dimension_numbers=numbers, **settings)
        found, expected = (trained(own, network(dtype)) for own in (ours, peer))
        tolerance = 1e-12 if dtype == "float64" else 1e-5
        chex.assert_trees_all_close(found, expected, rtol=0, atol=tolerance)


PRECONDITIONINGS = ("frobenius", "spectral", "schatten", "aol")


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize(
    "settings", [{"eps": 0.0}, {"eps": jnp.zeros([])}, {"ns_dtype": "float16"}], ids=str
)
def test_a_gradient_of_zero_moves_nothing(settings, preconditioning):
    """optax has 0/0 there without an epsilon; and in float16 that of the default is 0."""
    params = drawn({"bias": (5,), "high": (4, 3), "square": (6, 6)})
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = lb.muon(0.02, preconditioning=preconditioning, **settings)
    chex.assert_trees_all_equal(first_step(optimizer, zeros, params)[0], zeros)


@theirs
def test_adaptive_steps_are_those_of_optax_for_each_matrix_of_a_stack():
    """That of optax takes a stack for one matrix."""
    with enable_x64(True):
        layers = drawn({"bias": (5,), "first": (8, 12), "high": (12, 8)}, float)
        layers["second"] = 2 * layers["first"]
        expected = trained(optax.contrib.muon(0.002, adaptive=True), layers)
        stack = jnp.stack([layers.pop("first"), layers.pop("second")])
        ours = lb.muon(0.002, adaptive=True, stacked=lb.stacked_layers({"stack": 0}))
        found = trained(ours, layers | {"stack": stack})
        chex.assert_trees_all_close(
            found["stack"], jnp.stack([expected["first"], expected["second"]]), atol=1e-12
        )
        chex.assert_trees_all_close(found["high"], expected["high"], atol=1e-12)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_a_preconditioned_matrix_has_singular_values_of_at_most_one(preconditioning, size):
    """Of any size of the gradient, before the iterations."""
    matrix = size * drawn({"w": (24, 16)})["w"]
    for own in (matrix, matrix.T):
        scaled = newton_schulz(own, jnp.zeros(()), (), preconditioning, False)
        values = np.linalg.svd(scaled, compute_uv=False)
        assert 0.2 < values.max() < 1 + 1e-6


@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_a_stack_is_worked_on_some_at_a_time(number, monkeypatch):
    """In turns of two; the last may be of one."""
    stack = drawn({"stack": (number, 8, 12)})

    def step(stack):
        transform = lb.orthogonalize_momentum(stacked=lb.stacked_layers({"stack": 0}))
        return first_step(transform, stack, stack)[0]

    together = step(stack)
    monkeypatch.setattr(side_by_side, "ELEMENTS_AT_A_TIME", 2 * 8 * 8)
    chex.assert_trees_all_close(step(stack), together, atol=1e-6)
    compiled = jax.jit(step).lower(stack).as_text()
    assert ("stablehlo.while" in compiled) == (number > 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matrix_axes": {"nothing": (0, 1)}}, "matrix_axes: "),
        ({"matrix_axes": {"conv": (0, 1, 2)}}, "matrix_axes must have the tree structure"),
        ({"matrix_axes": {"conv": (0, 4)}}, "has 4 axes"),
        ({"matrix_axes": {"conv": ((0, 3), 3)}}, "an axis stands twice"),
        ({"matrix_mask": lb.matching("nothing")}, "matrix_mask: "),
    ],
)
def test_axes_and_masks_that_do_not_fit_the_parameters(settings, message):
    with pytest.raises(ValueError, match=message):
        lb.muon(0.1, **settings).init(network())


def test_a_vector_is_no_matrix():
    with pytest.raises(ValueError, match="'bias' of shape \\(5,\\) is no matrix"):
        lb.orthogonalize_momentum().init(network())


def told_to_pass_specs(function, *arguments):
    """The result of a function that warns, once, that nobody says how parameters are split."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result = function(*arguments)
    # In jax before 0.10, types know the mesh only in some calls.
    assert len(caught) == 1 or (not caught and jax.__version_info__ < (0, 10))
    assert all("with_partition_specs(optimizer, specs)" in str(each.message) for each in caught)
    return result


# Of one exchange: high and wide, split by rows, by columns and by both in either order, and copies.
SPLIT = {
    "columns": ((8, 16), P(None, ("fsdp", "tensor"))),
    "crossed": ((8, 16), P("tensor", "fsdp")),
    "filters": ((2, 2, 4, 8), P(None, None, "fsdp", "tensor")),
    "high": ((16, 8), P(("fsdp", "tensor"))),
    "layers": ((12, 8, 16), P(None, "fsdp", "tensor")),
    "of_copies": ((11, 16, 8), P(None, "fsdp")),
    "of_copies_too": ((8, 16), P("fsdp")),
    "pipeline": ((8, 8, 16), P("fsdp", None, "tensor")),
    "rows": ((16, 8), P(("tensor", "fsdp"))),
}


def step_of_split(gradients, eps, settings, **told):
    axes = {"filters": ((0, 1, 2), 3), "layers": (1, 2), "^of_copies$": (1, 2), "pipeline": (1, 2)}
    optimizer = lb.orthogonalize_momentum(eps=eps, matrix_axes=axes, **dict(settings))
    return optimizer.update(gradients, optimizer.init(gradients), **told)[0]


@functools.cache
def on_one_device(settings):
    """The gradients, and the step on whole ones, for all ways."""
    gradients = drawn({name: shape for name, (shape, _) in SPLIT.items()}, float)
    return gradients, jax.jit(functools.partial(step_of_split, settings=settings))(gradients, 3.0)


@on_shards
@pytest.mark.parametrize(
    ("way", "settings"),
    [
        *((way, {}) for way in ("told", "shard_map", "explicit", "not told")),
        ("told", {"adaptive": True, "preconditioning": "aol"}),
    ],
)
def test_matrices_that_are_split_step_as_whole_ones(way, settings):
    """`eps` is a number of the step, which all devices need."""
    step = functools.partial(step_of_split, settings=tuple(settings.items()))
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = mesh_of(kind, fsdp=4, tensor=2)
    specs = {name: spec for name, (_, spec) in SPLIT.items()}
    shardings = shardings_on(mesh, specs)
    with enable_x64(True):
        gradients, expected = on_one_device(tuple(settings.items()))
        if way == "shard_map":
            told = functools.partial(step, partition_specs=specs)
            run = jax.shard_map(told, mesh=mesh, in_specs=(specs, P()), out_specs=specs)
        else:
            told = {"partition_specs": shardings} if way == "told" else {}
            run = functools.partial(step, **told)
        run = jax.jit(run)
        arguments = jax.device_put(gradients, shardings), jnp.asarray(3.0)
        found = told_to_pass_specs(run, *arguments) if way == "not told" else run(*arguments)
        chex.assert_trees_all_close(jax.device_get(found), expected, rtol=0, atol=1e-12)


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="older jax needs a mesh to be set")
@pytest.mark.parametrize("tell", [True, False])
def test_a_mesh_may_have_one_device(tell):
    """As when a program for many is tried on a laptop."""
    mesh = mesh_of(AxisType.Explicit, fsdp=1)
    specs = {"bias": P(), "high": P("fsdp"), "stack": P(None, None, "fsdp")}
    shardings = shardings_on(mesh, specs)
    params = drawn({"bias": (5,), "high": (12, 8), "stack": (3, 8, 12)})
    optimizer = lb.muon(0.02, stacked=lb.stacked_layers({"stack": 0}))

    def step(params, **told):
        return first_step(optimizer, params, params, **told)[0]

    told = {"partition_specs": shardings} if tell else {}
    run = jax.jit(functools.partial(step, **told))
    found = run(jax.device_put(params, shardings))
    chex.assert_trees_all_close(jax.device_get(found), step(params), atol=1e-6)


@on_shards
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_train_networks_of_their_own_do_not_share_work(check_vma):
    """Unless types or specs say that they have copies."""
    optimizer = lb.orthogonalize_momentum()
    mesh = mesh_of(network=8)
    gradients = drawn({"w": (8, 4, 6)})

    def step(gradients):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        updates, _ = first_step(optimizer, gradients, gradients)
        return jax.tree.map(lambda x: x[None], updates)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=P("network"), out_specs=P("network"), check_vma=check_vma
    )
    if check_vma:
        with pytest.raises(ValueError, match="partition_specs must be given"):
            run(gradients)
        return
    for own, alone in zip(run(gradients)["w"], gradients["w"], strict=True):
        expected, _ = first_step(optimizer, {"w": alone}, {"w": alone})
        chex.assert_trees_all_close(own, expected["w"], atol=1e-6)


def test_many_parameters_are_named_once(monkeypatch):
    """Of a thousand each name was made a thousand times."""
    params = {f"layer_{k}": jnp.ones((2, 3)) for k in range(300)}
    params["conv"] = jnp.ones((2, 3, 4))
    names = []
    made = paths.wraps_one_array
    monkeypatch.setattr(paths, "wraps_one_array", lambda node: names.append(node) or made(node))
    check_axes({"conv": ((0, 1), 2)}, {}).blocks(params)
    assert len(names) < 10 * len(params)


MATRICES = {"bias": (32,), **{f"layer_{k}": (32, 64) for k in range(5)}, "stack": (4, 64, 32)}


def on_eight_devices(
    specs, tell, kind=AxisType.Auto, shapes=MATRICES, stacked="stack", make=lb.muon, **settings
):
    """A step for parameters that eight devices share, as it is lowered."""
    mesh = mesh_of(kind, fsdp=8)
    shardings = shardings_on(mesh, specs)
    params = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=shardings[name])
        for name, shape in shapes.items()
    }
    optimizer = make(0.1, stacked=lb.stacked_layers({stacked: 0}), **settings)
    state, layout = helpers.state_on(mesh, optimizer, params)
    told = {"partition_specs": shardings} if tell else {}
    step = jax.jit(
        lambda g, s, p: optimizer.update(g, s, p, **told), out_shardings=(shardings, layout)
    )
    return step.lower(params, state, params)


def collectives(*arguments, **settings):
    """How often devices speak to each other in a compiled step."""
    text = on_eight_devices(*arguments, **settings).compile().as_text()
    kinds = r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    return Counter(re.findall(rf" {kinds}(?:-start)?\(", text))


ROWS = {"bias": P(), **{f"layer_{k}": P("fsdp") for k in range(5)}, "stack": P(None, "fsdp")}


@on_shards
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_matrices_of_one_shape_are_exchanged_together(kind):
    """High ones too: a layer of the stack is a matrix of the others, turned. Types need no specs.

    They are not shared: their products take less time than it would to send them.
    """
    assert collectives(ROWS, tell=kind == AxisType.Auto, kind=kind) == {"all-to-all": 2}


HEAD = {"head": (64, 16), "last_bias": (16,)}


def test_vectors_of_the_head_are_not_on_a_sphere():
    """A bias of zeros would stay there."""
    params = {"head": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}, "up": jnp.ones((3, 3))}
    optimizer = lb.muonh(0.1, adamh_mask=lb.matching("head"))
    gradient = jax.tree.map(jnp.ones_like, params)
    updates, _ = first_step(optimizer, gradient, params)
    np.testing.assert_allclose(updates["head"]["bias"], np.full(2, -0.1 * 3 / 13), rtol=1e-6)
    with pytest.raises(ValueError, match=r"adamh_mask must select .*matching\('bias'\)"):
        lb.muonh(0.1, adamh_mask=lb.matching("bias")).init(params)


@pytest.mark.parametrize(
    ("make", "adam"),
    [
        (lb.muon, {"eps": 1e-8, "nesterov": True}),
        (lb.muonh, {"b2": 0.95, "eps": 1e-8}),
        (lb.adamh, {"b2": 0.95, "eps": 1e-8}),
    ],
)
def test_others_may_be_a_learning_rate(make, adam):
    params = drawn({"bias": (5,), "square": (6, 6)})
    schedule = optax.linear_schedule(0.3, 0.0, 4)
    others = lb.chain(lb.scale_by_adam(**adam), lb.scale_by_learning_rate(schedule))
    found = make(0.1, others=schedule)
    expected = trained(make(0.1, others=others), params)
    chex.assert_trees_all_close(trained(found, params), expected, atol=1e-6)
    chex.assert_trees_all_equal_structs(found.init(params), make(0.1).init(params))
    with pytest.raises(TypeError, match="learning_rate or others: what the schedule returns"):
        trained(make(0.1, others=lb.lamb), params)  # not called


@on_shards
@pytest.mark.parametrize(
    ("make", "settings"),
    [(lb.muonh, {"adamh_mask": lb.matching("head")}), (lb.muon, {"others": lb.lamb(0.1)})],
    ids=["muonh", "muon beside lamb"],
)
def test_the_norms_of_both_parts_travel_in_one_reduction(make, settings):
    """Those of matrices, after their exchanges, and those of what Adam moves; as it is lowered,
    since the compiler may join reductions, and need not."""
    specs, shapes = ROWS | {"head": P("fsdp"), "last_bias": P()}, MATRICES | HEAD
    if make is lb.muon:
        settings = settings | {"matrix_mask": ~lb.matching("head")}
    text = on_eight_devices(specs, tell=True, shapes=shapes, make=make, **settings).as_text()
    found = Counter(re.findall(r"stablehlo\.(all_reduce|all_to_all|all_gather)", text))
    assert found == {"all_to_all": 2, "all_reduce": 1}


@on_shards
@since_types_know_meshes
def test_matrices_are_not_gathered_where_nobody_says_how_they_are_split():
    found = collectives(ROWS, tell=False)
    assert not found["all-gather"]
    assert found["all-to-all"] <= 2 * 2


@on_shards
@pytest.mark.parametrize("tell", [True, pytest.param(False, marks=since_types_know_meshes)])
def test_a_stack_that_is_split_between_its_layers_does_not_move(tell):
    """Another matrix of the shape does, which is split by rows."""
    specs = {"bias": P(), "layer": P("fsdp"), "stack": P("fsdp")}
    shapes = {"bias": (32,), "layer": (16, 32), "stack": (8, 16, 32)}
    assert collectives(specs, tell, shapes=shapes) == {"all-to-all": 2}


@on_shards
def test_matrices_that_are_cut_alike_go_by_themselves_if_they_fill_all_devices():
    """Else a part of the devices would look at each matrix in a way that is not its own."""
    stacks = {"high": P(None, "fsdp"), "wide": P(None, "fsdp")}
    for layers, exchanges in ((8, 2), (4, 1)):
        shapes = {"high": (layers, 64, 32), "wide": (layers, 32, 64)}
        found = collectives(stacks, tell=True, shapes=shapes, stacked="high|wide")
        assert found == {"all-to-all": 2 * exchanges}
