"""Groups of devices that share a matrix step as one device does."""

import functools

import chex
import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from optax_largebatch import orthogonalize_momentum
from optax_largebatch.engine.matrices import groups
from tests.conftest import enable_x64
from tests.engine.steps import on_shards
from tests.helpers import drawn, first_step, mesh_of, shardings_on

AXES = ("fsdp", "tensor")


def step(gradients, matrix_axes=None, settings=(), **specs):
    optimizer = orthogonalize_momentum(matrix_axes=matrix_axes, **dict(settings))
    return first_step(optimizer, gradients, gradients, **specs)[0]


@pytest.fixture
def sending_is_free(monkeypatch):
    """So that small matrices are shared, too."""
    monkeypatch.setattr(groups, "OPERATIONS_OF_A_BYTE", 0)


@pytest.fixture
def chosen(monkeypatch):
    """The groups of several devices that have worked on matrices."""
    found, own = set(), groups.DeviceGroup.sum

    def noting(self, x):
        found.update({tuple(self)} - {tuple(groups.ALONE)})
        return own(self, x)

    monkeypatch.setattr(groups.DeviceGroup, "sum", noting)
    return found


# The mesh, the arrays with their specs, and the group that leaves no device idle.
CASES = {
    "two of an axis of eight": (
        (8, 1),
        {"stack": ((4, 16, 48), P(None, "fsdp", "tensor"))},
        ("fsdp", 2),
    ),
    "four of an axis of eight": ((8, 1), {"stack": ((2, 48, 16), P(None, "fsdp"))}, ("fsdp", 4)),
    "columns that must be filled up": (
        (8, 1),
        {"high": ((3, 40, 16), P(None, "fsdp")), "wide": ((16, 40), P("fsdp"))},
        ("fsdp", 2),
    ),
    "one whole axis": ((4, 2), {"stack": ((4, 16, 48), P(None, "fsdp", "tensor"))}, ("fsdp", 2)),
    "all of an axis of four": (
        (2, 4),
        {"square": ((2, 16, 16), P(None, "fsdp", "tensor"))},
        ("tensor", 4),
    ),
    "crossed, high and wide": (
        (2, 4),
        {"high": ((16, 8), P("tensor", "fsdp")), "wide": ((8, 16), P("fsdp", "tensor"))},
        ("tensor", 4),
    ),
    "devices with copies": ((2, 4), {"wide": ((4, 8, 16), P(None, "tensor"))}, ("tensor", 2)),
    "a group of copies": ((2, 4), {"wide": ((4, 6, 12), P(None, "fsdp"))}, ("fsdp", 2)),
    "a high one where wide ones leave devices idle": (
        (8, 1),
        {"wide": ((3, 6, 48), P(None, None, "fsdp")), "high": ((16, 6), P("fsdp"))},
        ("fsdp", 2),
    ),
    "filters": ((4, 2), {"filters": ((3, 2, 8, 16), P(None, None, "fsdp", "tensor"))}, ("fsdp", 4)),
}


@functools.cache
def on_one_device(case):
    """The gradients, the axes of matrices, and the step of one device, for all ways."""
    _, arrays, _ = CASES[case]
    axes = {name: ((0, 1, 2), 3) for name in arrays if name == "filters"}
    axes |= {name: (1, 2) for name, (shape, _) in arrays.items() if len(shape) == 3}
    gradients = drawn({name: shape for name, (shape, _) in arrays.items()}, float)
    return gradients, axes, jax.jit(functools.partial(step, matrix_axes=axes))(gradients)


def on_a_mesh(case, way):
    """The step of a case, compiled for its mesh by `jax.jit`, and the gradients on the mesh."""
    sizes, arrays, _ = CASES[case]
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = mesh_of(kind, **dict(zip(AXES, sizes, strict=True)))
    specs = {name: spec for name, (_, spec) in arrays.items()}
    shardings = shardings_on(mesh, specs)
    gradients, axes, _ = on_one_device(case)
    run = functools.partial(step, matrix_axes=axes)
    if way == "shard_map":
        run = functools.partial(run, partition_specs=specs)
        run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs)
    elif way == "specs":
        run = functools.partial(run, partition_specs=shardings)
    return jax.jit(run), jax.device_put(gradients, shardings)


@on_shards
@pytest.mark.parametrize(
    ("case", "way"),
    [
        *((case, "specs") for case in CASES),
        *(("crossed, high and wide", way) for way in ("shard_map", "explicit")),
    ],
)
def test_a_group_steps_as_one_device(case, way, sending_is_free, chosen):
    with enable_x64(True):
        run, gradients = on_a_mesh(case, way)
        found, expected = jax.device_get(run(gradients)), on_one_device(case)[-1]
        chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-10)
    assert chosen == {CASES[case][-1]}


@on_shards
def test_narrow_matrices_take_the_places_that_wide_ones_leave(sending_is_free):
    """They travel together, and a pair of devices that would idle has the narrow one."""
    with enable_x64(True):
        run, gradients = on_a_mesh("a high one where wide ones leave devices idle", "specs")
        assert str(run.trace(gradients).jaxpr).count(" all_to_all[") == 2


@on_shards
@pytest.mark.parametrize(
    ("preconditioning", "groups_chosen"),
    [*((name, {("fsdp", 8)}) for name in ("frobenius", "aol", "schatten")), ("spectral", set())],
)
def test_what_a_matrix_is_divided_by_is_that_of_the_whole(
    preconditioning, groups_chosen, sending_is_free, chosen
):
    """A singular value decomposition, for `"spectral"`, gets whole matrices."""
    settings = {"preconditioning": preconditioning, "ns_coeffs": "polar_express"}
    split = NamedSharding(mesh_of(fsdp=8), P("fsdp"))
    run = jax.jit(functools.partial(step, settings=settings, partition_specs=split))
    with enable_x64(True):
        gradients = drawn({"w": (16, 24)}, float)
        found, expected = run(jax.device_put(gradients, split)), step(gradients, settings=settings)
        chex.assert_trees_all_close(jax.device_get(found), expected, rtol=0, atol=1e-10)
    assert chosen == groups_chosen


def cheapest(number, sides, axes, itemsize=2):
    plans = groups.sharing_plans(number, sides, axes, itemsize)
    return min(plans, key=lambda plan: plan.cost)


def test_what_the_model_chooses_for_7b_on_256_devices():
    """A pair for each square matrix: four would leave none idle either, and send more."""
    for axes in ({"fsdp": 256}, {"fsdp": 32, "tensor": 8}):
        square, wide = (cheapest(n, s, axes) for n, s in ((128, (4096,) * 2), (96, (4096, 11008))))
        assert square.group.size == wide.group.size == 2
        even = 5 * (128 * 6 * 4096**3 + 96 * 4096**2 * (4 * 11008 + 2 * 4096)) / 256
        assert 1 < (square.operations + wide.operations) / even < 1.25
        # With a matrix for each head, 32 square ones are left: the wide ones have places for them.
        assert cheapest(128, (4096, 11008), axes).cost == wide.cost


def test_the_model_leaves_8_devices_alone():
    for number, sides in ((128, (4096, 4096)), (96, (4096, 11008)), (49, (768, 768))):
        assert cheapest(number, sides, {"fsdp": 8}).group == groups.ALONE


def test_columns_are_filled_up_to_what_all_parts_have():
    plans = groups.sharing_plans(1, (8, 20), {"a": 2}, 4, unit=8)
    (plan,) = (x for x in plans if x.group.size == 2)
    assert plan.columns == 16
    assert plan.operations == 5 * (4 * 8**2 * 16 + 8**3)
