"""What is used of JAX's insides: the tables in the engine's README are true, and JAX has it all."""

import ast
from pathlib import Path
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import optax_largebatch
from tests.engine.steps import on_shards, several_devices, since_types_know_meshes
from tests.helpers import mesh_of

PACKAGE = Path(optax_largebatch.__file__).parent
SECTION = re.search(
    r"^## What is used of JAX's insides\n(.*?)^## ",
    (PACKAGE / "engine" / "README.md").read_text(),
    re.DOTALL | re.MULTILINE,
)[1]
INSIDES = ("jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")
"""The modules of which JAX does not promise that they stay."""


def rows(columns):
    """The rows of the table with so many columns, as lists of the names in each cell."""
    found = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("| `")]
    return [
        [re.findall(r"`([^`]+)`", cell) for cell in row] for row in found if len(row) == columns
    ]


def is_inside(module):
    return any(module == own or module.startswith(f"{own}.") for own in INSIDES)


def used_in(file):
    """The names that a file takes from JAX's insides; of a module, those that it looks up there."""
    tree = ast.parse(file.read_text())
    names, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(is_inside(own.name) for own in node.names), f"{file}: import a name"
        elif isinstance(node, ast.ImportFrom) and is_inside(node.module or ""):
            for own in node.names:
                name = f"{node.module}.{own.name}"
                if node.module == "jax.interpreters":
                    modules[own.asname or own.name] = name
                else:
                    names.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            assert not is_inside(owner), f"{file}: {owner} is not imported by name"
            if owner in modules:
                names.add(f"{modules[owner]}.{node.attr}")
    return names


def test_the_table_has_what_is_imported():
    used = {}
    for file in PACKAGE.rglob("*.py"):
        for name in used_in(file):
            used.setdefault(name, set()).add(file.relative_to(PACKAGE).as_posix())
    table = {name: set(files) for (name,), files, _ in rows(3)}
    assert table == used


def test_two_primitives_and_their_lowerings_are_in_one_file():
    names = re.compile("jaxpr|jax.extend|jax.interpreters")
    inside = {file for file in PACKAGE.rglob("*.py") if names.search(file.read_text())}
    (file,) = inside
    assert file == PACKAGE / "engine" / "compilation.py"
    assert len(re.findall(r"\bPrimitive\(", file.read_text())) == 2


def test_the_table_has_the_attributes_with_a_default():
    used = set()
    for file in [PACKAGE / "norms.py", *(PACKAGE / "engine").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                name = ast.literal_eval(node.args[1])
                if name != "sharding" and not name.startswith("_"):  # those are promised
                    used.add((name, file.relative_to(PACKAGE).as_posix()))
    table = {(name, file) for names, _, (file,), _ in rows(4) for name in names}
    assert table == used


@several_devices
@since_types_know_meshes
def test_a_type_knows_of_what_devices_its_mesh_is():
    mesh = mesh_of(data=8)
    split = jax.device_put(np.ones(8, "float32"), NamedSharding(mesh, P("data")))
    platforms = []

    @jax.jit
    def noting(x):
        platforms.append(jax.typeof(x).sharding.mesh.abstract_device.platform)
        return x

    noting(split)
    assert platforms == ["cpu"]


@on_shards
def test_inside_shard_map_a_type_knows_along_which_axes_devices_differ():
    mesh = mesh_of(data=4, copies=2)
    seen = []

    def noting(x):
        kind = jax.typeof(x)
        before = jax.__version_info__ < (0, 10)
        seen.append(kind.vma if before else kind.manual_axis_type.varying)
        seen.append({*jax.sharding.get_abstract_mesh().manual_axes})
        return x

    jax.shard_map(noting, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(8))
    assert seen == [{"data"}, {"data", "copies"}]
