"""Muon's step as XLA compiles it for eight H100s and TPUs, on any machine.

    python -m benchmarks.compiled_muon

Compiles the whole step (update and `apply_updates`, donated) of this library's Muon and of
`optax.contrib.muon`, with all parameters split by rows between eight devices, or stacks between
their layers; and of 32 layers of a network with 7 billion parameters for 256 devices. Counts what
is sent, during how many of these exchanges a device multiplies, the bytes that its kernels read and
write, and its products, compared with an even share of the products on one device.

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
from benchmarks.harness.results import add_output, write_csv
from benchmarks.harness.steps import updated
from benchmarks.harness.trees import bert, is_shape, stacked_bert
import optax_largebatch as lb
from optax_largebatch.params.stacked import Stacked

LAYERS = 24
MATRICES = lb.excluding("embeddings")


class Case(NamedTuple):
    """A network and how it is split."""

    shapes: Callable[[], dict[str, Any]]
    exchanged: int
    """How many shapes of matrices are split, a high and a wide one with the same sides as one or
    as two."""
    stacked: Stacked | None = None
    between_layers: bool = False
    axes: Mapping[str, int] = MappingProxyType({"fsdp": 8})
    """The devices along each axis of the mesh."""
    target: str = ""
    """The only machine that it is compiled for, if there is one."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Matrices by rows, vectors by their one axis, or stacks by their layers.

        Where eight devices cannot share the rows, a matrix is split by columns. On a mesh of two
        axes it is split by both: `fsdp` splits the width of the network, be it rows or columns.
        """
        if len(self.axes) > 1:
            return PartitionSpec(None, *sorted(self.axes, reverse=name in TO_THE_WIDTH))
        if self.between_layers and shape[:1] == (LAYERS,):
            return PartitionSpec("fsdp")
        for axis in range(max(len(shape) - 2, 0), len(shape)):
            if shape[axis] % 8 == 0:
                return PartitionSpec(*[None] * axis, "fsdp")
        return PartitionSpec()


def _stacked() -> dict[str, Any]:
    return stacked_bert(LAYERS, 1024)


def _of_7b() -> dict[str, Any]:
    """The matrices of 32 layers of a transformer with 7 billion parameters."""
    square = dict.fromkeys(("key", "out", "query", "value"), (32, 4096, 4096))
    return {"layers": square | {"down": (32, 11008, 4096), "gate": WIDE, "up": WIDE}}


WIDE = (32, 4096, 11008)
TO_THE_WIDTH = ("down", "out")
"""The matrices whose columns are the width of the network."""
STACKED = lb.stacked_layers({"^layers/": 0})
CASES = {
    "BERT-base, rows": Case(lambda: bert(12, 768), 3),
    "BERT-large stacked, rows": Case(_stacked, 3, STACKED),
    "BERT-large stacked, layers": Case(_stacked, 1, STACKED, between_layers=True),
    **{
        f"7B stacked, {fsdp} x {tensor}": Case(
            _of_7b, 2, STACKED, axes={"fsdp": fsdp, "tensor": tensor}, target="v5e 16x16"
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
        stacked=case.stacked,
        ns_dtype=dtype,
        **settings,
    )


def _with_trust_ratio(case: Case) -> optax.GradientTransformationExtraArgs:
    return _ours(case, trust_ratio=True)


def _on_spheres(case: Case) -> optax.GradientTransformationExtraArgs:
    return lb.muonh(
        1e-3,
        "standard",
        matrix_mask=_matrices(case),
        adamh_mask=lb.matching("embeddings/word"),
        stacked=case.stacked,
    )


def _matrices(case: Case) -> Any:
    """The mask of Muon's parameters; the large network has no embeddings."""
    return None if case.target else MATRICES


def _theirs(case: Case) -> optax.GradientTransformation:
    def numbers(params: Any) -> Any:
        def own(chosen: bool, x: Any) -> Any:
            is_stack = case.stacked is not None and x.shape[0] in (LAYERS, WIDE[0])
            matrix = optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
            return matrix if chosen and x.ndim - is_stack == 2 else None

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
    "muon, not told": Way(_ours),
    "muon, trust ratio": Way(_with_trust_ratio, told=True, reductions=1),
    "muonh": Way(_on_spheres, told=True, reductions=1),
}
"""The first is what the others are compared with."""

LARGE_WAYS = ("optax.contrib.muon", "muon, bfloat16")
"""What is compiled for hundreds of devices."""

MOST_TEMPORARIES = 2.0
MOST_BY_LAYERS = 0.5
"""Where nothing moves."""
MOST_PRODUCTS = 1.1
MOST_IN_GROUPS = {
    "7B stacked, 256 x 1": {"products_of_a_share": 1.25, "temporaries_of_own_parameters": 4.0},
    "7B stacked, 32 x 8": {"products_of_a_share": 1.25, "temporaries_of_own_parameters": 3.0},
}
LEAST_HIDDEN = 0.5
"""Of the exchanges, those during which a device multiplies; the first and the last one cannot be
among them. XLA for a TPU does nothing else during an all-to-all, unless it is told to."""


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is worse than it should be in a step that is told how parameters are split."""
    ours = [row for row in rows if OPTIMIZERS[row["optimizer"]].told]
    return [line for row in ours for line in _failures_of(row)]


def _failures_of(row: Mapping[str, Any]) -> Iterator[str]:
    case, cell = CASES[row["case"]], ", ".join((row["target"], row["case"], row["optimizer"]))
    sent = {kind: int(n) for kind, n in (x.split(":") for x in row["collectives"].split())}
    exchanges = sent.pop("all-to-all", 0)
    reductions = OPTIMIZERS[row["optimizer"]].reductions
    if exchanges > 2 * case.exchanged:
        yield f"{cell}: sends {row['collectives']}, allowed are {2 * case.exchanged} all-to-alls"
    if case.target:
        yield from _failures_of_groups(cell, row)
        return
    if sent.pop("all-reduce", 0) != reductions or sent:
        yield f"{cell}: sends {row['collectives']}, allowed are {reductions} all-reduces besides"
    most = MOST_BY_LAYERS if case.between_layers else MOST_TEMPORARIES
    if float(row["temporaries_beyond_adamw"]) > most:
        yield f"{cell}: temporaries are {row['temporaries_beyond_adamw']}, allowed are {most}"
    hidden, exchanges = map(int, row["exchanges_during_products"].split(" of "))
    at_once = row["target"] == "eight H100" or OPTIMIZERS[row["optimizer"]].options is not None
    if at_once and hidden < LEAST_HIDDEN * exchanges:
        yield f"{cell}: multiplies during {hidden} of {exchanges} exchanges"
    if float(row["products_of_a_share"]) > MOST_PRODUCTS:
        yield f"{cell}: products are {row['products_of_a_share']}, allowed are {MOST_PRODUCTS}"


def _failures_of_groups(cell: str, row: Mapping[str, Any]) -> Iterator[str]:
    """The same where a group of devices shares each matrix, and sends sums of its products."""
    for name, most in MOST_IN_GROUPS[row["case"]].items():
        if float(row[name]) > most:
            yield f"{cell}: {name} is {row[name]}, allowed are {most}"


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
        spec = case.spec(path[-1].key, shape) if number > 1 else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map_with_path(placed, case.shapes(), is_leaf=is_shape)
    own = (
        jax.tree.map(lambda x: x.sharding, params),
        lb.shard_optimizer_state(optimizer, params, mesh),
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
    if not CASES[case_name].target:
        return Products(compiled(target_name, case_name, name, 1, False).as_text()).operations
    # One device has no memory for it: five iterations of X X^T, its square, and the product with X.
    total = 0
    for number, *sides in jax.tree.leaves(CASES[case_name].shapes(), is_leaf=is_shape):
        height, width = sorted(sides)
        total += 5 * number * (4 * height**2 * width + 2 * height**3)
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
        "bytes_for_each_parameter": round(Program(text).cost().bytes / own_parameters, 2),
        "versions": versions(),
    }


def main() -> None:
    """Compiles, prints and writes."""
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
        if not CASES[case].target or name in LARGE_WAYS
    ]
    rows = []
    for cell in tqdm(cells, desc="compiling"):
        rows.append(measure(*cell))
        write_csv(rows, args.output / "compiled_muon.csv")
        print(*rows[-1].values(), sep=" | ")
    if args.check and (worse := failures(rows)):
        raise SystemExit("\n".join(["worse than allowed:", *worse]))


if __name__ == "__main__":
    main()
