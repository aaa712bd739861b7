"""Muon's step as XLA compiles it for eight H100s and TPUs, on any machine.

    python -m benchmarks.compiled_muon

Compiles the whole step (update and `apply_updates`, donated) of this library's Muon and of
`optax.contrib.muon`, with all parameters split by rows between eight devices, or stacks between
their layers; of stacks and of experts on meshes of several axes; and of 32 layers of a network with
7 billion parameters for 256 devices. Counts what is sent; the largest array that is gathered, in
units of the smallest matrix; during how many of the exchanges a device multiplies; the bytes that
its kernels read and write; and its products, compared with an even share of the products on one
device.

Temporaries are counted twice, in units of a device's own parameters. First, of the step alone,
whose gradients are arguments. Second, of a step that makes its gradients, as a training step does,
beyond those of `optax.adamw`: there, results take the memory that gradients leave. XLA takes more
memory where it has more, so that it may send and multiply at the same time.

Everything is compiled and nothing is timed. Writes `compiled_muon.csv`. With `--check` it ends with
an error if a step is worse than `failures` allows.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import math
from types import MappingProxyType
from typing import Any, NamedTuple

# This first: the compilers read their settings when jax is loaded.
from benchmarks.compiled_step.targets import TARGETS  # isort: skip

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax
from tqdm import tqdm

from benchmarks.compiled_step.products import Products
from benchmarks.compiled_step.program_text import Program
from benchmarks.harness.machine import versions
from benchmarks.harness.results import add_output, report, write_csv
from benchmarks.harness.steps import updated
from benchmarks.harness.trees import bert, is_shape, stacked_bert
import optax_largebatch as lb
from optax_largebatch.params.stacked import Stacked

LAYERS = 24
MATRICES = ~lb.matching("embeddings")
TO_THE_WIDTH = ("down", "out")
"""The matrices whose columns are the width of the network."""
STACKED = lb.stacked_layers({"^layers/": 0})
LARGE_WAYS = ("optax.contrib.muon", "muon, bfloat16")
"""What is compiled for hundreds of devices."""
MESH_WAYS = ("optax.contrib.muon", "muon", "muon, no specs", "muonh")
"""What is compiled for meshes of several axes."""

Split = Callable[[str, tuple[int, ...]], PartitionSpec]
"""How a parameter is split, by its name and its shape."""


def _by_rows(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Matrices by rows, vectors by their one axis.

    Where eight devices cannot share the rows, a matrix is split by columns.
    """
    del name
    for axis in range(max(len(shape) - 2, 0), len(shape)):
        if shape[axis] % 8 == 0:
            return PartitionSpec(*[None] * axis, "fsdp")
    return PartitionSpec()


def _by_layers(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Stacks between their layers."""
    return PartitionSpec("fsdp") if shape[:1] == (LAYERS,) else _by_rows(name, shape)


def _by_both(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Both axes of each matrix: `fsdp` splits the width of the network, be it rows or columns."""
    del shape
    return PartitionSpec(None, *sorted(("fsdp", "tensor"), reverse=name in TO_THE_WIDTH))


def _by_rows_over_both(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """The rows of each matrix, between the devices of two mesh axes."""
    del name, shape
    return PartitionSpec(None, ("fsdp", "tensor"))


def _by_the_last_first(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """The same rows, between the axes of the mesh in reverse order."""
    del name, shape
    return PartitionSpec(None, ("tensor", "fsdp"))


def _by_experts(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Experts between devices, and both axes of each: `data` splits the width of the network."""
    del shape
    both = sorted(("data", "model"), reverse=name in TO_THE_WIDTH)
    return PartitionSpec(None, "expert", *both)


class Case(NamedTuple):
    """A network and how it is split."""

    shapes: Callable[[], dict[str, Any]]
    exchanged: int
    """How many shapes of matrices are split, a high and a wide one with the same sides as one or
    as two."""
    matrix: int
    """The elements of its smallest matrix."""
    split: Split = _by_rows
    stacked: Stacked | None = None
    has_only_matrices: bool = False
    """Whether it has no embeddings and no vectors."""
    axes: Mapping[str, int] = MappingProxyType({"fsdp": 8})
    """The devices along each axis of the mesh."""
    optimizers: Sequence[str] | None = None
    """What is compiled for it; None for all."""
    target: str = ""
    """The only machine that it is compiled for, if there is one."""
    fused: int = 1
    """The matrices in `qkv`, next to each other: three for each head."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    @property
    def matrix_axes(self) -> Any:
        """The argument of this name."""
        return {"qkv": f"layers rows ({self.fused} columns)"} if self.fused > 1 else None


def _stacked() -> dict[str, Any]:
    return stacked_bert(LAYERS, 1024)


def _layers(number: int, width: int, hidden: int) -> dict[str, Any]:
    """The matrices of the layers of a transformer, in stacks."""
    square = dict.fromkeys(("key", "out", "query", "value"), (number, width, width))
    wide = (number, width, hidden)
    return {"layers": square | {"down": (number, hidden, width), "gate": wide, "up": wide}}


def _fused(network: dict[str, Any]) -> dict[str, Any]:
    """The matrices of a network with queries, keys and values in one array."""
    layers = network["layers"]
    number, width, _ = layers["query"]
    others = {name: layers[name] for name in layers.keys() - {"key", "query", "value"}}
    return {"layers": others | {"qkv": (number, width, 3 * width)}}


def _not_fused() -> dict[str, Any]:
    """The matrices of the layers of BERT-large."""
    layers = _layers(LAYERS, 1024, 4096)["layers"]
    return {"layers": {name: x for name, x in layers.items() if name != "gate"}}


def _experts() -> dict[str, Any]:
    """The matrices of eight layers of eight experts."""
    wide, high = (8, 8, 1024, 2816), (8, 8, 2816, 1024)
    return {"experts": {"down": high, "gate": wide, "up": wide}}


def _of_7b() -> dict[str, Any]:
    """The matrices of 32 layers of a transformer with 7 billion parameters."""
    return _layers(32, 4096, 11008)


LARGE = Case(_of_7b, 2, 4096**2, _by_both, STACKED, has_only_matrices=True)
CASES = {
    "BERT-base, rows": Case(lambda: bert(12, 768), 3, 768**2),
    "BERT-large stacked, rows": Case(_stacked, 3, 1024**2, _by_rows, STACKED),
    "BERT-large stacked, layers": Case(_stacked, 1, 1024**2, _by_layers, STACKED),
    "24 layers stacked, 4 x 2": Case(
        lambda: _layers(LAYERS, 1024, 4096),
        4,
        1024**2,
        _by_both,
        STACKED,
        has_only_matrices=True,
        axes={"fsdp": 4, "tensor": 2},
        optimizers=MESH_WAYS,
        target="eight H100",
    ),
    "24 layers stacked, rows over 4 x 2": Case(
        lambda: _layers(LAYERS, 1024, 4096),
        3,
        1024**2,
        _by_rows_over_both,
        STACKED,
        has_only_matrices=True,
        axes={"fsdp": 4, "tensor": 2},
        optimizers=MESH_WAYS,
        target="eight H100",
    ),
    "24 layers stacked, rows over 2 x 4": Case(
        lambda: _layers(LAYERS, 1024, 4096),
        3,
        1024**2,
        _by_the_last_first,
        STACKED,
        has_only_matrices=True,
        axes={"fsdp": 4, "tensor": 2},
        optimizers=["muon", "muon, no specs"],
        target="eight H100",
    ),
    "experts stacked, 2 x 2 x 2": Case(
        _experts,
        2,
        1024 * 2816,
        _by_experts,
        lb.stacked_layers({"^experts/": (0, 1)}),
        has_only_matrices=True,
        axes={"expert": 2, "data": 2, "model": 2},
        optimizers=MESH_WAYS,
        target="eight H100",
    ),
    "24 layers stacked, heads fused, 4 x 2": Case(
        lambda: _fused(_not_fused()),
        4,
        1024 * 64,
        _by_both,
        STACKED,
        has_only_matrices=True,
        axes={"fsdp": 4, "tensor": 2},
        optimizers=["muon", "muonh"],
        target="eight H100",
        fused=3 * 16,
    ),
    "24 layers stacked, not fused, 4 x 2": Case(
        _not_fused,
        4,
        1024**2,
        _by_both,
        STACKED,
        has_only_matrices=True,
        axes={"fsdp": 4, "tensor": 2},
        optimizers=["muon"],
        target="eight H100",
    ),
    "7B stacked, 8 x 1": LARGE._replace(
        exchanged=4,
        axes={"fsdp": 8, "tensor": 1},
        optimizers=["muon, bfloat16"],
        target="eight H100",
    ),
    **{
        f"7B stacked, {fsdp} x {tensor}": LARGE._replace(
            axes={"fsdp": fsdp, "tensor": tensor}, optimizers=LARGE_WAYS, target="v5e 16x16"
        )
        for fsdp, tensor in ((256, 1), (32, 8))
    },
    **{
        f"7B stacked, heads fused, {fsdp} x {tensor}": LARGE._replace(
            shapes=lambda: _fused(_of_7b()),
            axes={"fsdp": fsdp, "tensor": tensor},
            optimizers=["muon, bfloat16"],
            target="v5e 16x16",
            fused=3 * 32,
        )
        for fsdp, tensor in ((256, 1), (32, 8))
    },
}


def _in_bfloat16(case: Case) -> optax.GradientTransformationExtraArgs:
    return _ours(case, jnp.bfloat16)


def _ours(case: Case, dtype: Any = None, **settings: Any) -> optax.GradientTransformationExtraArgs:
    return lb.muon(
        1e-3,
        weight_decay=0.01,
        consistent_rms=0.2,
        matrix_mask=_matrices(case),
        matrix_axes=case.matrix_axes,
        stacked=case.stacked,
        ns_dtype=dtype,
        **settings,
    )


def _on_spheres(case: Case) -> optax.GradientTransformationExtraArgs:
    """MuonH, with AdamH for the word embedding, which is the last layer, too."""
    return _muonh(case, None if case.has_only_matrices else lb.matching("embeddings/word"))


def _muonh(case: Case, head: Any = None) -> optax.GradientTransformationExtraArgs:
    return lb.muonh(
        1e-3,
        ns_coeffs="standard",
        matrix_mask=_matrices(case),
        adamh_mask=head,
        matrix_axes=case.matrix_axes,
        stacked=case.stacked,
    )


def _matrices(case: Case) -> Any:
    """The mask of Muon's parameters."""
    return None if case.has_only_matrices else MATRICES


def _theirs(case: Case) -> optax.GradientTransformation:
    def numbers(params: Any) -> Any:
        def own(chosen: bool, x: Any) -> Any:
            is_stack = case.stacked is not None and x.shape[0] == LAYERS
            is_matrix = case.has_only_matrices or x.ndim - is_stack == 2
            matrix = optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
            return matrix if chosen and is_matrix else None

        chosen = _matrices(case)
        mask = jax.tree.map(lambda x: True, params) if chosen is None else chosen.mask(params)
        return jax.tree.map(own, mask, params)

    return optax.contrib.muon(
        1e-3, weight_decay=0.01, consistent_rms=0.2, muon_weight_dimension_numbers=numbers
    )


class Way(NamedTuple):
    """An optimizer, and how its step is made."""

    make: Callable[[Case], Any]
    told: bool = False
    """Whether `update` is told how parameters are split."""
    options: Mapping[str, str] | None = None
    """Options for the compiler; a way that has some is for TPUs."""
    reductions: int = 0
    """The all-reduces that it needs, for the norms of all parameters."""


ASYNCHRONOUS = {"xla_tpu_enable_async_all_to_all": "true"}
OPTIMIZERS = {
    "optax.adamw": Way(lambda case: optax.adamw(1e-3, weight_decay=0.01)),
    "optax.contrib.muon": Way(_theirs),
    "muon": Way(_ours, told=True),
    "muon, bfloat16": Way(_in_bfloat16, told=True),
    "muon, bfloat16, asynchronous": Way(_in_bfloat16, told=True, options=ASYNCHRONOUS),
    "muon, no specs": Way(_ours),
    "muonh": Way(_on_spheres, told=True, reductions=1),
    "muonh, embeddings by Adam": Way(_muonh, told=True, reductions=1),
}
"""The first is what the others are compared with."""

ROWS = {"temporaries_beyond_adamw": 2.1, "products_of_a_share": 1.1}
MESH = {
    "temporaries_of_own_parameters": 3.5,
    "products_of_a_share": 1.1,
    "largest_gathered": 0.9,
}
LIMITS = {
    "BERT-base, rows": ROWS,
    "BERT-large stacked, rows": ROWS,
    "BERT-large stacked, layers": ROWS | {"temporaries_beyond_adamw": 0.65},  # nothing moves
    "24 layers stacked, 4 x 2": MESH,
    "24 layers stacked, rows over 4 x 2": MESH,
    "experts stacked, 2 x 2 x 2": MESH,
    "24 layers stacked, rows over 2 x 4": MESH,
    "24 layers stacked, heads fused, 4 x 2": MESH,
    "24 layers stacked, not fused, 4 x 2": MESH,
    "7B stacked, 8 x 1": MESH,
    "7B stacked, 256 x 1": {"temporaries_of_own_parameters": 4.0, "products_of_a_share": 1.25},
    "7B stacked, 32 x 8": {"temporaries_of_own_parameters": 3.0, "products_of_a_share": 1.25},
    # Matrices of three layouts are in one exchange, and each is computed in all of them.
    "7B stacked, heads fused, 256 x 1": {
        "temporaries_of_own_parameters": 5.5,
        "products_of_a_share": 1.25,
    },
    "7B stacked, heads fused, 32 x 8": {
        "temporaries_of_own_parameters": 3.5,
        "products_of_a_share": 1.25,
    },
}
"""The most that a step may have which is told how parameters are split."""

SPLIT_ALONG_BOTH = {"temporaries_of_own_parameters": 5.0, "largest_gathered": 0.9}
NOT_TOLD = {
    "24 layers stacked, 4 x 2": SPLIT_ALONG_BOTH,
    "experts stacked, 2 x 2 x 2": SPLIT_ALONG_BOTH,
    "24 layers stacked, rows over 2 x 4": SPLIT_ALONG_BOTH,
    # XLA gathers the stacks: two mesh axes split one axis of each, and it is asked to move the
    # first of the mesh first. It moves by an all-to-all only the last of those that split an axis.
    "24 layers stacked, rows over 4 x 2": {"temporaries_of_own_parameters": 11.0},
}
"""The most that a step may have which is not told, on a mesh of several axes."""

LEAST_HIDDEN = 0.5
"""Of the exchanges, those during which a device multiplies; the first and the last one cannot be
among them. XLA for a TPU does nothing else during an all-to-all, unless it is told to."""


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is worse than it should be in the steps of this library."""
    return [line for row in rows for line in _failures_of(row)]


def _failures_of(row: Mapping[str, Any]) -> Iterator[str]:
    case, cell = CASES[row["case"]], ", ".join((row["target"], row["case"], row["optimizer"]))
    told = OPTIMIZERS[row["optimizer"]].told
    limits = LIMITS if told else NOT_TOLD if row["optimizer"] == "muon, no specs" else {}
    for name, most in limits.get(row["case"], {}).items():
        if float(row[name]) > most:
            yield f"{cell}: {name} is {row[name]}, allowed are {most}"
    if not told:
        return
    sent = {kind: int(n) for kind, n in (x.split(":") for x in row["collectives"].split())}
    exchanges = sent.pop("all-to-all", 0)
    if exchanges > 2 * case.exchanged:
        yield f"{cell}: sends {row['collectives']}, allowed are {2 * case.exchanged} all-to-alls"
    if len(case.axes) > 1:  # in a group, sums of products are sent
        return
    reductions = OPTIMIZERS[row["optimizer"]].reductions
    if reductions and case.stacked:  # vectors with the angle and the radius of each layer
        sent.pop("all-gather", 0)
    if sent.pop("all-reduce", 0) != reductions or sent:
        yield f"{cell}: sends {row['collectives']}, allowed are {reductions} all-reduces besides"
    hidden, exchanges = map(int, row["exchanges_during_products"].split(" of "))
    at_once = row["target"] == "eight H100" or OPTIMIZERS[row["optimizer"]].options is not None
    # XLA hides no exchange of MuonH where each layer is an array.
    if reductions and case.stacked is None:
        return
    if at_once and hidden < LEAST_HIDDEN * exchanges:
        yield f"{cell}: multiplies during {hidden} of {exchanges} exchanges"


@functools.cache
def compiled(target_name: str, case_name: str, name: str, number: int, gradients: bool) -> Any:
    """A step as it is compiled.

    Args:
        target_name: the machine.
        case_name: the network.
        name: the optimizer.
        number: the number of devices.
        gradients: whether the step makes its gradients.
    """
    case = CASES[case_name]
    make, told, options, _ = OPTIMIZERS[name]
    optimizer = make(case)
    lengths = [*case.axes.values()] if number > 1 else [1] * len(case.axes)
    devices = np.array(TARGETS[target_name].devices()[:number]).reshape(lengths)
    mesh = Mesh(devices, [*case.axes])

    def placed(path: Any, shape: tuple[int, ...]) -> Any:
        spec = case.split(path[-1].key, shape) if number > 1 else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map_with_path(placed, case.shapes(), is_leaf=is_shape)
    own = (
        jax.tree.map(lambda x: x.sharding, params),
        lb.optimizer_state_shardings(optimizer, params, mesh),
    )
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, params),
        own[1],
    )
    extra = {"partition_specs": own[0]} if told and number > 1 else {}

    def step(params: Any, state: Any, given: Any) -> Any:
        if gradients:  # all in memory at once, as after a backward pass
            given = jax.lax.optimization_barrier(jax.tree.map(lambda x: 0.5 * x, given))
        return updated(optimizer, given, params, state, **extra)

    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=own)
    return jitted.lower(params, state, params).compile(options and dict(options))


def _products_on_one_device(target_name: str, case_name: str, name: str) -> float:
    """The multiplications and additions of a step where one device has everything."""
    if not CASES[case_name].has_only_matrices:
        return Products(compiled(target_name, case_name, name, 1, False).as_text()).operations
    # One device may have no memory for it: five iterations of X X^T, its square, and their product
    # with X.
    total = 0
    shapes, _ = jax.tree.flatten_with_path(CASES[case_name].shapes(), is_leaf=is_shape)
    for (*_, key), (*stack, rows, columns) in shapes:
        parts = CASES[case_name].fused if key.key == "qkv" else 1
        height, width = sorted((rows, columns // parts))
        total += 5 * math.prod(stack) * parts * (4 * height**2 * width + 2 * height**3)
    return total


def measure(target_name: str, case_name: str, name: str) -> dict[str, Any]:
    """A row of the table."""
    devices = CASES[case_name].devices
    shapes = jax.tree.leaves(CASES[case_name].shapes(), is_leaf=is_shape)
    own_bytes = sum(4 * math.prod(shape) for shape in shapes) / devices
    own_parameters = own_bytes / 4

    def temporaries(optimizer: str, gradients: bool) -> float:
        step = compiled(target_name, case_name, optimizer, devices, gradients)
        return step.memory_analysis().temp_size_in_bytes / own_bytes

    text = compiled(target_name, case_name, name, devices, False).as_text()
    during = Products(text).during("all-to-all")
    more = temporaries(name, True) - temporaries("optax.adamw", True)
    share = _products_on_one_device(target_name, case_name, name) / devices
    return {
        "target": target_name,
        "case": case_name,
        "optimizer": name,
        "collectives": " ".join(f"{kind}:{n}" for kind, n in Program(text).collectives.items()),
        "exchanges_during_products": f"{sum(map(bool, during))} of {len(during)}",
        "temporaries_of_own_parameters": round(temporaries(name, False), 2),
        "temporaries_beyond_adamw": round(more, 2),
        "products_of_a_share": round(Products(text).operations / share, 3),
        "largest_gathered": round(Program(text).largest_gathered / CASES[case_name].matrix, 2),
        "bytes_for_each_parameter": round(Program(text).cost().bytes / own_parameters, 2),
        "versions": versions(),
    }


def main() -> None:
    """Compiles and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", nargs="+", default=["eight H100", "v5e 2x4", "v5e 16x16"])
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS][1:])
    parser.add_argument("--check", action="store_true", help="compare with what is allowed")
    add_output(parser, "compiled")
    args = parser.parse_args()
    targets = [name for name in args.target if TARGETS[name].is_available]
    for name in {*args.target} - {*targets}:
        print(f"{name}: left out, its compiler is not installed (`make compilers`)")
    cells = [
        (target, case, name)
        for target in targets
        for case in args.case
        for name in args.optimizer
        if OPTIMIZERS[name].options is None or TARGETS[target].platform == "tpu"
        if TARGETS[target].number == CASES[case].devices
        if CASES[case].target in ("", target)
        if name in (CASES[case].optimizers or OPTIMIZERS)
    ]
    rows = []
    for cell in tqdm(cells, desc="compiling"):
        rows.append(measure(*cell))
        write_csv(rows, args.output / "compiled_muon.csv")
    if not rows:
        return
    report(rows, args.output / "compiled_muon.csv")
    if args.check and (worse := failures(rows)):
        raise SystemExit("\n".join(["worse than allowed:", *worse]))


if __name__ == "__main__":
    main()
