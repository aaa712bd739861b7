"""Matrices that are fused in one parameter move as they would apart, wherever the step runs."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.testing import check
from tests.conftest import enable_x64
from tests.helpers import drawn, mesh_of
from tests.test_same_everywhere import (
    in_pmap,
    in_shard_map,
    nothing_read_back,  # noqa: F401
    on_a_mesh,
    on_one_device,
    trained,
)

pytestmark = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")

# The text, the shape, and the specs on a mesh of one axis and on one of several.
FUSED = {
    "qkv": ("rows (3 columns)", (8, 48), P("fsdp"), P("fsdp", "tensor")),
    "queries_of_groups": (
        "layers rows columns=24+8+8",
        (3, 8, 40),
        P(None, None, "fsdp"),
        P(None, "tensor", "fsdp"),
    ),
    "gate_and_up": ("rows (columns 2)", (8, 32), P(None, "fsdp"), P(None, ("fsdp", "tensor"))),
    "mla": ("rows (4 columns=6+4)", (8, 40), P("fsdp"), P("tensor")),
    "odd": ("rows (3 columns)", (7, 15), P(), P()),
    "out": ("(2 rows) columns", (16, 6), P("fsdp"), P("fsdp")),
    "heads": ("rows heads columns", (8, 3, 16), P("fsdp"), P("tensor", None, "fsdp")),
    "one": ("rows (1 columns)", (8, 16), P("fsdp"), P("fsdp", "tensor")),
}
AXES = {f"^{name}$": text for name, (text, *_) in FUSED.items()}
ONE_AXIS = {name: spec for name, (*_, spec, _) in FUSED.items()}
TWO_AXES = {name: spec for name, (*_, spec) in FUSED.items()}


def network():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, (_, shape, *_) in FUSED.items()}


def apart(params):
    """Each matrix by itself."""
    mla = params["mla"].reshape(8, 4, 10)
    matrices = {
        "qkv": np.split(params["qkv"], 3, 1),
        "queries_of_groups": [
            x for layer in params["queries_of_groups"] for x in np.split(layer, [24, 32], 1)
        ],
        "gate_and_up": [params["gate_and_up"][:, k::2] for k in range(2)],
        "mla": [mla[:, k, part] for k in range(4) for part in (slice(6), slice(6, 10))],
        "odd": np.split(params["odd"], 3, 1),
        "out": np.split(params["out"], 2, 0),
        "heads": [params["heads"][:, k] for k in range(3)],
        "one": [params["one"]],
    }
    return {f"{name}/{k}": x for name, found in matrices.items() for k, x in enumerate(found)}


ITERATIONS = 2  # more of the same only make larger programs


def muon(**arguments):
    return lb.muon(0.1, weight_decay=0.1, beta=0.9, ns_steps=ITERATIONS, **arguments)


def normuon(**arguments):
    return lb.chain(
        lb.orthogonalize_momentum(0.9, ns_steps=ITERATIONS, **arguments),
        lb.normalize_neurons(**arguments),
        lb.scale_by_learning_rate(0.1),
    )


def by_norms(make, **arguments):
    """An optimizer whose norms are of the parts that `stacked` says."""
    return lambda stacked, matrix_axes=None: make(
        0.1, stacked={**(matrix_axes or {}), **stacked}, **arguments
    )


OPTIMIZERS = {
    "muon": muon,
    "of Adam's size": functools.partial(muon, consistent_rms=0.2),
    "muonh": functools.partial(lb.muonh, 0.1, beta=0.9, ns_steps=ITERATIONS),
    "muonh, radius of the start": functools.partial(lb.muonh, 0.1, beta=0.9, radius="start"),
    "normuon": normuon,
    "lamb": by_norms(lb.lamb, weight_decay=0.1),
    "adamh": by_norms(lb.adamh, radius="start"),
    "scaled_adam": by_norms(lb.scaled_adam),
}
SLOW = (
    "of Adam's size",
    "muonh, radius of the start",
    "scaled_adam",
)
LAYERS = {"queries_of_groups": 0}


@functools.cache
def expected(name):
    with enable_x64(True):
        optimizer = OPTIMIZERS[name](stacked={})
        params = jax.tree.map(jnp.asarray, apart(network()))
        return jax.device_get(trained(optimizer, params, optimizer.init(params))[0])


def several(kind=AxisType.Auto, **sizes):
    return {"mesh": mesh_of(kind, **sizes or {"fsdp": 4, "tensor": 2}), "specs": TWO_AXES}


WARNS = [pytest.mark.filterwarnings("ignore:The update works on whole matrices")]
WAYS = {
    "one device": (on_one_device, dict),
    "automatic mesh": (on_a_mesh, lambda: {"specs": ONE_AXIS}),
    "automatic mesh of two axes, not told": (on_a_mesh, several),
    "explicit mesh": (
        on_a_mesh,
        lambda: {"specs": ONE_AXIS, "mesh": mesh_of(AxisType.Explicit, fsdp=8)},
    ),
    "explicit mesh of two axes": (on_a_mesh, lambda: several(AxisType.Explicit)),
    "mesh, with specs": (on_a_mesh, lambda: {"specs": ONE_AXIS, "partition_specs": ONE_AXIS}),
    "mesh of three axes, with specs": (
        on_a_mesh,
        lambda: several(data=2, fsdp=2, tensor=2) | {"partition_specs": TWO_AXES},
    ),
    "shard_map": (in_shard_map, lambda: {"specs": ONE_AXIS}),
    "shard_map of two axes": (in_shard_map, several),
    "pmap": (in_pmap, lambda: {"specs": ONE_AXIS}),
}


EVERYWHERE = ("muonh", "lamb")
IN_SHORT = ("one device", "explicit mesh of two axes", "shard_map of two axes")
# Spheres need what Muon needs and norms besides; the norms of `lamb` come with a text in `stacked`.
QUICK = {"muonh": IN_SHORT, "lamb": IN_SHORT, "normuon": IN_SHORT[:2]}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(
            way,
            name,
            marks=WARNS * ("not told" in way)
            + [pytest.mark.slow] * (name in SLOW or way not in QUICK.get(name, IN_SHORT[:1])),
        )
        for name in OPTIMIZERS
        for way in (WAYS if name in EVERYWHERE else IN_SHORT)
    ],
)
def test_fused_equals_apart(way, name, x64):
    run, given = WAYS[way]
    params = jax.tree.map(jnp.asarray, network())
    axes = AXES | ({"^out$": "rows columns"} if name == "normuon" else {})
    params, _ = run(OPTIMIZERS[name](matrix_axes=axes, stacked=LAYERS), params, **given())
    found = apart(jax.device_get(params))
    for matrix, wanted in expected(name).items():
        if name != "normuon" or not matrix.startswith("out"):
            np.testing.assert_allclose(found[matrix], wanted, 1e-12, 1e-12, err_msg=matrix)


def test_what_explain_says():
    shapes = {"qkv": (2, 4, 16), "tall": (12, 4), "wi_fused": (4, 16), "kernel": (4, 8)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def explained(**matrix_axes):
        optimizer = lb.muon(0.1, matrix_axes=matrix_axes, stacked={"qkv": 0})
        return {one.name: one for one in lb.explain(optimizer, params).parameters}

    silent = explained()
    assert ["several matrices" in "".join(silent[name].notes) for name in params] == [1, 1, 1, 0]
    assert "'layers rows columns=2048+512+512'}, with the lengths" in silent["qkv"].notes[0]
    assert "'(3 rows) columns'}, or 3 times the heads in the" in silent["tall"].notes[0]
    assert "if it is one, 'rows columns'" in silent["tall"].notes[0]
    assert "'rows (2 columns)'}, or 2 times the heads" in silent["wi_fused"].notes[0]
    said = explained(qkv="layers rows columns=8+4+4", tall="rows columns")
    assert said["qkv"].matrices == {(4, 8): 2, (4, 4): 4}
    assert not said["qkv"].notes
    assert not said["tall"].notes
    assert explained(qkv="layers rows (2 columns)")["qkv"].matrices == {(4, 8): 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers rows", "has 2 items for 3 axes"),
        ("layers rows (3 columns)", r"has \(3 columns\) for an axis of 16"),
        ("layers rows columns=8+4", "has columns=8.4 for an axis of 16"),
        ("layers rows (a columns)", r"has \(a columns\) for an axis"),
        ("layers rows (2 4 2)", "must have an axis with rows"),
        ("layers (2 rows columns=2) columns", "another one with columns"),
        ("layers rows (columns=3+1 columns=3+1)", "may have one sum"),
        ("layers rows 3*columns", r"has '3\*columns', which is no number"),
        ("3 rows columns", "has 3 for an axis of 2"),
    ],
)
def test_a_text_that_does_not_fit(text, message):
    params = {"qkv": jnp.ones((2, 4, 16))}
    optimizer = lb.muon(0.1, matrix_axes={"qkv": text}, stacked={"qkv": 0})
    with pytest.raises(ValueError, match=f"'qkv' of shape .2, 4, 16.: it.*{message}"):
        optimizer.init(params)


@pytest.mark.slow
def test_accumulates_and_goes_on_on_another_mesh(x64):
    muonh = lb.muonh(0.1, ns_steps=ITERATIONS, matrix_axes=AXES, stacked=LAYERS)
    params, optimizer = network(), lb.accumulate_gradients(muonh, every=2)
    middle, state = jax.device_get(on_a_mesh(optimizer, params, specs=ONE_AXIS))
    given = several() | {"partition_specs": TWO_AXES, "state": state}
    found, _ = on_a_mesh(optimizer, middle, **given)
    run = jax.jit(functools.partial(trained, optimizer))
    wanted, _ = run(*run(params, optimizer.init(params)))
    found, wanted = jax.device_get((found, wanted))
    chex.assert_trees_all_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_adaptive_steps_are_of_whole_matrices():
    params = {"qkv": jnp.ones((4, 12))}
    optimizer = lb.orthogonalize_momentum(adaptive=True, matrix_axes={"qkv": "rows (3 columns)"})
    with pytest.raises(ValueError, match="adaptive must be False"):
        optimizer.init(params)


def test_devices_share_what_no_shard_cuts():
    """Queries, keys and values of a kernel that is split by rows travel as if they stood apart."""
    mesh = mesh_of(fsdp=8, tensor=1)  # an axis of one device splits nothing
    spec = P("fsdp", "tensor")
    by_rows = jax.NamedSharding(mesh, spec)

    def exchanged(shapes, **arguments):
        params = {
            name: jax.ShapeDtypeStruct(shape, "float32", sharding=by_rows)
            for name, shape in shapes.items()
        }
        optimizer = lb.muon(0.1, **arguments)
        update = functools.partial(optimizer.update, partition_specs=dict.fromkeys(shapes, spec))
        with jax.set_mesh(mesh):
            text = jax.jit(update).lower(params, jax.eval_shape(optimizer.init, params), params)
        return sorted(re.findall(r"stablehlo.all_to_all.*(tensor<\S+)$", text.as_text(), re.M))

    shapes = {"qkv": (16, 48), "out": (16, 16)}
    fused = exchanged(shapes, matrix_axes={"qkv": "rows (3 columns)"})
    assert len(fused) == 2
    assert fused == exchanged(dict.fromkeys("qkvo", (16, 16)))
    assert fused == exchanged(shapes, matrix_axes={"qkv": "rows columns=16+16+16"})
    assert fused != exchanged(shapes, matrix_axes={"qkv": "rows columns"})


@pytest.mark.slow
def test_does_the_same_however_it_is_run():
    params = drawn({"qkv": (4, 12), "too": (4, 12), "parts": (6, 8), "kernel": (4, 6)})
    axes = {"qkv|too": "rows (3 columns)", "parts": "rows columns=4+2+2"}
    check(lb.normalize_neurons(matrix_axes=axes), params)
    check(lb.scale_by_trust_ratio(stacked=axes), params)


def test_what_the_state_has_for_each():
    params = jax.tree.map(jnp.asarray, network())
    stacks = LAYERS | {"heads": 1}
    states = [muon(matrix_axes=axes, stacked=stacks).init(params) for axes in (AXES, None)]
    chex.assert_trees_all_equal(*states)
    optimizer = lb.lamb(0.1, stacked=AXES)
    ratios = lb.trust_ratios(optimizer, optimizer.init(params), params)
    shapes = {name: x.shape for name, x in ratios.items() if x.shape}
    threes, twos = dict.fromkeys(["qkv", "odd", "heads"], (3,)), {"gate_and_up": (2,), "out": (2,)}
    assert shapes == threes | twos | {"queries_of_groups": (3, 3), "mla": (8,)}


def test_a_text_that_cuts_nothing():
    params = {"out": jnp.ones((8, 4))}
    for text in "rows (columns=2 columns=2)", "(1 rows) (1 columns)":
        assert len(lb.muonh(0.1, matrix_axes={"out": text}).init(params)[-1].radii) == 1, text


def test_parts_on_spheres_beside_an_optimizer_of_optax():
    params = {"out": jnp.arange(1.0, 33).reshape(8, 4)}

    def moved(**options):
        optimizer = lb.adamh(0.1, stacked={"out": "rows columns=1+3"}, **options)
        return trained(optimizer, params, optimizer.init(params))[0]

    chex.assert_trees_all_equal(moved(others=optax.sgd(0.1)), moved())


def test_what_does_not_go():
    params = {"out": jnp.ones((8, 4))}
    with pytest.raises(ValueError, match=r"neurons \(side='longer'\) alone"):  # one has 6, one 2
        lb.normalize_neurons(side="longer", matrix_axes={"out": "columns=6+2 rows"}).init(params)
    for make in (
        functools.partial(lb.muon, matrix_axes={"out": "rows (2 columns)"}, stacked={"out": 0}),
        functools.partial(lb.lamb, stacked={"out": "rows (2 columns)", "ou": 0}),
    ):
        with pytest.raises(ValueError, match="rows or columns along axis 0 of 'out', which stacks"):
            make(0.1).init(params)
    for text in "(2 rows) columns", "(2 rows) (2 columns)":
        with pytest.raises(ValueError, match="matrix_axes must cut the axis of the neurons"):
            lb.normalize_neurons(matrix_axes={"out": text}).init(params)
    for make in muon, lb.centralize_gradients, lb.measure_noise_scale:
        with pytest.raises(ValueError, match="stacked must be axes without a text here"):
            make(stacked={"out": "(2 rows) columns"}).init(params)
    for text, message in {
        "rows columns=3+2": "does not fit 'out' of shape .8, 4.: it has columns=3.2",
        "rows": "has 1 items for 2 axes",
        "(2 columns) (2 columns)": "must cut one axis of 'out', and cuts two",
    }.items():
        with pytest.raises(ValueError, match=message):
            lb.lamb(0.1, stacked={"out": text}).init(params)
