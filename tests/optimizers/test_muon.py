"""Muon: the numbers of optax, and what travels between devices."""

from collections import Counter
import functools
import itertools
import re
import warnings

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine.matrices import side_by_side
from optax_largebatch.params import paths
from optax_largebatch.params.matrix_axes import check_axes
from optax_largebatch.transforms.orthogonalization.coefficients import PUBLISHED
from optax_largebatch.transforms.orthogonalization.newton_schulz import newton_schulz
from tests import helpers
from tests.conftest import enable_x64
from tests.engine.steps import on_shards, since_types_know_meshes
from tests.helpers import drawn

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


def network(dtype, shapes=SHAPES):
    return drawn(shapes, dtype)


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


@functools.cache
def trained_by_optax(name, dtype):
    """Compiled once for both ways to say what is a matrix."""
    numbers = numbers_of_optax()
    peer = optax.contrib.muon(
        RATE, weight_decay=0.1, muon_weight_dimension_numbers=numbers, **SETTINGS[name]
    )
    return trained(peer, network(dtype))


def marks_of(name, said_by, dtype):
    """Rules give the same axes with any settings, and float32 the same but for rounding."""
    fast = name == "plain" or (said_by == "numbers" and dtype == "float64")
    return () if fast else pytest.mark.slow


@theirs
@pytest.mark.parametrize(
    ("name", "said_by", "dtype"),
    [
        pytest.param(*case, marks=marks_of(*case))
        for case in itertools.product(SETTINGS, ("numbers", "rules"), ("float64", "float32"))
    ],
)
def test_equals_that_of_optax(name, said_by, dtype):
    with enable_x64(dtype == "float64"):
        if said_by == "numbers":
            matrices = {"matrix_axes": numbers_of_optax()}
        else:
            matrices = {"matrix_axes": CONVOLUTION, "stacked": STACKED}
        ours = lb.muon(RATE, weight_decay=0.1, **matrices, **SETTINGS[name])
        found, expected = trained(ours, network(dtype)), trained_by_optax(name, dtype)
        tolerance = 1e-12 if dtype == "float64" else 1e-5
        chex.assert_trees_all_close(found, expected, rtol=0, atol=tolerance)


@theirs
def test_an_epsilon_of_zero_is_that_of_optax():
    params = network("float32", {"bias": (5,), "square": (6, 6)})
    expected = trained(optax.contrib.muon(0.02, eps=0.0), params)
    chex.assert_trees_all_close(trained(lb.muon(0.02, eps=0.0), params), expected, atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, jnp.zeros([])], ids=["float", "array"])
def test_without_an_epsilon_a_gradient_of_zero_moves_nothing(eps):
    """optax has 0/0 there."""
    params = network("float32", {"bias": (5,), "square": (6, 6)})
    zeros = jax.tree.map(jnp.zeros_like, params)
    for optimizer in (lb.muon(0.02, eps=eps), lb.lamb(0.1, eps=eps)):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        chex.assert_trees_all_equal(updates, zeros)


@theirs
def test_adaptive_steps_are_those_of_optax_for_each_matrix_of_a_stack():
    """That of optax takes a stack for one matrix."""
    with enable_x64(True):
        layers = network("float64", {"bias": (5,), "first": (8, 12), "high": (12, 8)})
        layers["second"] = 2 * layers["first"]
        expected = trained(optax.contrib.muon(0.002, adaptive=True), layers)
        stack = jnp.stack([layers.pop("first"), layers.pop("second")])
        ours = lb.muon(0.002, adaptive=True, stacked=lb.stacked_layers({"stack": 0}))
        found = trained(ours, layers | {"stack": stack})
        chex.assert_trees_all_close(
            found["stack"], jnp.stack([expected["first"], expected["second"]]), atol=1e-12
        )
        chex.assert_trees_all_close(found["high"], expected["high"], atol=1e-12)


@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "schatten", "aol"])
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_a_preconditioned_matrix_has_singular_values_of_at_most_one(preconditioning, size):
    """Of any size of the gradient, before the iterations."""
    matrix = size * network("float32", {"w": (24, 16)})["w"]
    for own in (matrix, matrix.T):
        scaled = newton_schulz(own, jnp.zeros(()), (), preconditioning, False)
        values = np.linalg.svd(scaled, compute_uv=False)
        assert 0.2 < values.max() < 1 + 1e-6


@pytest.mark.parametrize("preconditioning", ["schatten", "aol"])
def test_preconditioning_takes_no_product_more(preconditioning):
    def products(kind):
        own = functools.partial(
            newton_schulz,
            coefficients=PUBLISHED["dion"].of(5),
            preconditioning=kind,
            eps_is_floor=False,
        )
        return str(jax.make_jaxpr(own)(jnp.ones((24, 16)), jnp.ones(()))).count("dot_general")

    assert products(preconditioning) == products("frobenius") == 15


@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_a_stack_is_worked_on_some_at_a_time(number, monkeypatch):
    """In turns of two; the last may be of one."""
    stack = network("float32", {"stack": (number, 8, 12)})

    def step(stack):
        transform = lb.orthogonalize_momentum(stacked=lb.stacked_layers({"stack": 0}))
        return transform.update(stack, transform.init(stack))[0]

    together = step(stack)
    monkeypatch.setattr(side_by_side, "ELEMENTS_AT_A_TIME", 2 * 8 * 8)
    chex.assert_trees_all_close(step(stack), together, atol=1e-6)
    compiled = jax.jit(step).lower(stack).as_text()
    assert ("stablehlo.while" in compiled) == (number > 2)


def test_bfloat16_iterations_keep_a_float32_momentum():
    params = network("bfloat16")
    optimizer = lb.muon(0.02, ns_dtype="bfloat16", matrix_axes=CONVOLUTION, stacked=STACKED)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["wide"].dtype == jnp.bfloat16
    momentum, *_ = state[0].inner_states["muon"].inner_state
    assert momentum.mu["wide"].dtype == jnp.float32
    full = lb.muon(0.02, matrix_axes=CONVOLUTION, stacked=STACKED)
    expected, _ = full.update(params, full.init(params), params)
    own, wide = (x["wide"].astype("float32") for x in (updates, expected))
    assert 0 < jnp.linalg.norm(own - wide) < 0.15 * jnp.linalg.norm(wide)


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
        lb.muon(0.1, **settings).init(network("float32"))


def test_a_vector_is_no_matrix():
    with pytest.raises(ValueError, match="'bias' of shape \\(5,\\) is no matrix"):
        lb.orthogonalize_momentum().init(network("float32"))


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
    gradients = network("float64", {name: shape for name, (shape, _) in SPLIT.items()})
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
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
    specs = {name: spec for name, (_, spec) in SPLIT.items()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
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
    mesh = jax.make_mesh(
        (1,), ("fsdp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]
    )
    specs = {"bias": P(), "high": P("fsdp"), "stack": P(None, None, "fsdp")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = network("float32", {"bias": (5,), "high": (12, 8), "stack": (3, 8, 12)})
    optimizer = lb.muon(0.02, stacked=lb.stacked_layers({"stack": 0}))

    def step(params, **told):
        return optimizer.update(params, optimizer.init(params), params, **told)[0]

    told = {"partition_specs": shardings} if tell else {}
    run = jax.jit(functools.partial(step, **told))
    found = run(jax.device_put(params, shardings))
    chex.assert_trees_all_close(jax.device_get(found), step(params), atol=1e-6)


@on_shards
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_train_networks_of_their_own_do_not_share_work(check_vma):
    """Unless types or specs say that they have copies."""
    optimizer = lb.orthogonalize_momentum()
    mesh = jax.make_mesh((8,), ("network",), axis_types=(AxisType.Auto,))
    gradients = network("float32", {"w": (8, 4, 6)})

    def step(gradients):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        updates, _ = optimizer.update(gradients, optimizer.init(gradients))
        return jax.tree.map(lambda x: x[None], updates)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=P("network"), out_specs=P("network"), check_vma=check_vma
    )
    if check_vma:
        with pytest.raises(ValueError, match="partition_specs must be given"):
            run(gradients)
        return
    for own, alone in zip(run(gradients)["w"], gradients["w"], strict=True):
        expected, _ = optimizer.update({"w": alone}, optimizer.init({"w": alone}))
        chex.assert_trees_all_close(own, expected["w"], atol=1e-6)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "schatten", "aol"])
def test_a_gradient_of_zeros_stays_zero(dtype, preconditioning):
    """In float16 the default of `eps` is 0."""
    optimizer = lb.orthogonalize_momentum(
        eps=1e-8 if dtype else 0.0, ns_dtype=dtype, preconditioning=preconditioning
    )
    zeros = {"w": jnp.zeros((3, 4))}
    updates, _ = optimizer.update(zeros, optimizer.init(zeros))
    chex.assert_trees_all_equal(updates, zeros)


def test_many_parameters_are_named_once():
    """Of a thousand each name was made a thousand times."""
    params = {f"layer_{k}": jnp.ones((2, 3)) for k in range(300)}
    params["conv"] = jnp.ones((2, 3, 4))
    names = []
    rule = lb.stacked_layers({})
    with pytest.MonkeyPatch.context() as patch:
        made = paths.path_name
        patch.setattr(paths, "path_name", lambda *of: names.append(of) or made(*of))
        check_axes({"conv": ((0, 1), 2)}, rule).blocks(params)
    assert len(names) < 10 * len(params)


MATRICES = {"bias": (32,), **{f"layer_{k}": (32, 64) for k in range(5)}, "stack": (4, 64, 32)}


def on_eight_devices(
    specs, tell, kind=AxisType.Auto, shapes=MATRICES, stacked="stack", make=lb.muon, **settings
):
    """A step for parameters that eight devices share, as it is lowered."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
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
def test_matrices_of_one_shape_are_exchanged_together():
    """High ones too: a layer of the stack is a matrix of the others, turned."""
    assert collectives(ROWS, tell=True) == {"all-to-all": 2}


HEAD = {"head": (64, 16), "last_bias": (16,)}


def test_vectors_of_the_head_are_not_on_a_sphere():
    """A bias of zeros would stay there."""
    params = {"head": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}, "up": jnp.ones((3, 3))}
    optimizer = lb.muonh(0.1, adamh_mask=lb.matching("head"))
    gradient = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
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
    params = network("float32", {"bias": (5,), "square": (6, 6)})
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
def test_types_say_how_to_exchange():
    assert collectives(ROWS, tell=False, kind=AxisType.Explicit) == {"all-to-all": 2}


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
