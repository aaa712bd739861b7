"""The requests of a leaf program, and what is known of them without arrays.

A leaf program works on one leaf. If it needs to know something of the whole block, it yields a
request and gets the answer back::

    param_norm, update_norm = yield block_norms(at.param, update)

All leaves make their requests in rounds. The sums of a round, of the whole network, travel between
devices as one vector.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.params.matrices import Matrices
from optax_largebatch.params.segments import Segments
from optax_largebatch.params.shapes import Axes

Kind = Literal["norm", "rms", "sum", "mean"]

Path = tuple[str | int, ...]
"""The position of a transform among those that it is combined with, from the outside inwards:
numbers in chains and sums, names in partitions."""

Held = Literal["sharded", "replicated", "partial"]
"""What the devices that share a leaf have of an array: shards of it, copies of it, or terms. The
array is then the sum of its terms."""

Splits = Callable[[Axes], norms.Split]
"""How a leaf is split between devices, by the axes that are kept."""


class Statistic(NamedTuple):
    """A statistic of one array that a leaf program asks for."""

    array: jax.Array
    kind: Kind
    kept: Axes | None = None
    """The axes that are not summed over. They keep their place in the answer. None stands for the
    axes of the leaf that run over its blocks."""
    held: Held = "sharded"

    @property
    def key(self) -> Any:
        """What equal statistics share."""
        return id(self.array), *self[1:]

    @property
    def is_root(self) -> bool:
        """Whether it is the root of a sum of squares."""
        return self.kind in ("norm", "rms")

    @property
    def term(self) -> jax.Array:
        """What is summed: the elements or their squares."""
        return norms.square(self.array) if self.is_root else self.array


@dataclasses.dataclass(frozen=True)
class Request:
    """A round of statistics, answered by a list with one array for each.

    An answer is a number, or has all axes of the leaf if the statistic keeps some, so that it
    broadcasts.
    """

    statistics: tuple[Statistic, ...]
    is_global: bool = False
    """Whether the statistic is of all leaves together."""
    path: Path | None = None
    """The position of the transform that asks."""

    def of(self, at: "Leaf", segments: Segments | None) -> "Request":
        """The request of the transform that works on a leaf, whose blocks have norms."""

        def of_blocks(x: Statistic) -> Statistic:
            if x.kept is not None:
                return x
            if segments is None:
                return x._replace(kept=at.stacked)
            sums = segments.sums_of_each(norms.block_sum(x.term, at.stacked))
            return Statistic(sums, "sum", tuple(range(sums.ndim)), "partial")

        statistics = tuple(map(of_blocks, self.statistics))
        return dataclasses.replace(self, statistics=statistics, path=at.run.path)

    @functools.cached_property
    def distinct(self) -> dict[Any, Statistic]:
        """The statistics without repetitions, by their keys."""
        return {x.key: x for x in self.statistics}

    def answers(
        self,
        sums: Sequence[jax.Array],
        dtype: jnp.dtype,
    ) -> list[jax.Array]:
        """The answer for each statistic, from the sums (or means) for the distinct ones."""
        by_key = dict(zip(self.distinct, sums, strict=True))
        answers = []
        for x in self.statistics:
            answer = by_key[x.key]
            answer = norms.from_sum_of_squares(answer) if x.is_root else answer
            answers.append(answer.astype(dtype))
        return answers


class MatrixFunction(NamedTuple):
    """A function of each matrix of an array, without the array."""

    function: Callable[..., jax.Array]
    matrices: Matrices
    dtype: jax.typing.DTypeLike | None
    splits: bool
    """Whether the function takes `group=` and a matrix that a group of devices shares."""


class EachMatrix(NamedTuple):
    """A request for a function of each matrix, answered by an array like the one handed in."""

    array: jax.Array
    numbers: tuple[Any, ...]
    """What the function is given after its matrix."""
    on: MatrixFunction

    def apply(self, matrix: jax.Array, **group: Any) -> jax.Array:
        """The result for one matrix."""
        return self.on.function(matrix, *self.numbers, **group)

    def to_batch(self) -> jax.Array:
        """The matrices of the array, or their shards: (matrices, rows, columns)."""
        return self.on.matrices.to_batch(self.array)

    def from_batch(self, matrices: jax.Array) -> jax.Array:
        """An array like the one handed in, of its matrices: the reverse of `to_batch`."""
        return self.on.matrices.from_batch(matrices, self.array.shape)

    def arrays(self, dtype: jnp.dtype) -> list[jax.Array]:
        """The array and the numbers in the dtype of the function, or else in `dtype`."""
        dtype = jnp.dtype(self.on.dtype or dtype)
        numbers = [jnp.asarray(x, dtype) for x in self.numbers]
        return [norms.cast(self.array, dtype), *numbers]


Tasks = Mapping[Any, EachMatrix]
"""The requests of several leaves, by any keys."""


class Hoist(NamedTuple):
    """Numbers of blocks, answered by themselves, and known before the last pass over the leaf."""

    values: tuple[jax.Array, ...]


class Materialize(NamedTuple):
    """A request to write an array to memory, answered by the array as written."""

    array: jax.Array
    dtype: jax.typing.DTypeLike | None


class StatisticInfo(NamedTuple):
    """What is known of a statistic without its array."""

    kind: Kind
    kept: Axes
    split: norms.Split
    elements: int
    """The elements of a block on this device."""

    @property
    def is_mean(self) -> bool:
        """Whether a sum is divided by the number of elements."""
        return self.kind in ("mean", "rms")


class Round(NamedTuple):
    """A request without its arrays; repeated statistics count once."""

    statistics: tuple[StatisticInfo, ...] = ()
    of_each: MatrixFunction | None = None
    """The function, if the request is for each matrix."""
    global_of: Path | None = None
    """For a norm of all leaves, the transform that asks: it is of the leaves that it works on."""
    index: int = 0
    """How many such norms this transform has asked for before."""

    @property
    def norm(self) -> tuple[Path | None, int]:
        """Which norm of all leaves it is."""
        return self.global_of, self.index


def round_of(request: Request | EachMatrix, splits: Splits) -> Round:
    """A request without its arrays."""
    if isinstance(request, EachMatrix):
        return Round(of_each=request.on)

    def info(x: Statistic) -> StatisticInfo:
        kept = x.kept or ()
        blocks = math.prod(norms.shape_of_blocks(x.array.shape, kept))
        split = norms.Split()
        if x.held != "replicated":
            split = splits(() if x.held == "partial" else kept)
        elements = x.array.size // max(blocks, 1)
        return StatisticInfo(x.kind, kept, split, max(elements, 1))

    statistics = tuple(map(info, request.distinct.values()))
    return Round(statistics, global_of=request.path if request.is_global else None)


def block_norms(*arrays: jax.Array, kept: Axes | None = None) -> Request:
    """Asks for the norms of the blocks of arrays of one leaf.

    Args:
        *arrays: arrays of the shape of the leaf.
        kept: the axes that are not summed over; None for those that the transform calls `stacked`.
    """
    return _statistics("norm", arrays, kept)


def block_rms(*arrays: jax.Array, kept: Axes | None = None) -> Request:
    """Asks for the root mean squares of the blocks of arrays of one leaf; see `block_norms`."""
    return _statistics("rms", arrays, kept)


def block_means(*arrays: jax.Array, kept: Axes | None = None) -> Request:
    """Asks for the means of the blocks of arrays of one leaf; see `block_norms`."""
    return _statistics("mean", arrays, kept)


def block_sums(*arrays: jax.Array, kept: Axes | None = None) -> Request:
    """Asks for the sums of the blocks of arrays of one leaf; see `block_norms`."""
    return _statistics("sum", arrays, kept)


def _statistics(
    kind: Kind,
    arrays: tuple[jax.Array, ...],
    kept: Axes | None,
) -> Request:
    return Request(tuple([Statistic(array, kind, kept) for array in arrays]))


def in_one_round(*requests: Request) -> Request:
    """Asks for the statistics of several requests in one round.

    Args:
        *requests: requests of one leaf, such as `block_norms(x, y)` and `block_sums(x * y)`.
    """
    return Request(tuple([x for request in requests for x in request.statistics]))


def hoist(*values: jax.Array) -> Hoist:
    """Asks for numbers of blocks to be known before the last pass over the leaf.

    Ask for what follows from answers alone and is used for each element, such as a trust ratio, and
    for new numbers of the state. The answer is the numbers themselves. On a GPU, numbers that are
    not hoisted are computed again in the kernels of each leaf, or in kernels of their own.

    Args:
        *values: numbers that follow from answers, scalars and numbers of the state.
    """
    return Hoist(values)


def sums_over_devices(*arrays: jax.Array) -> Request:
    """Asks for the sums of arrays over the devices that have shards of the leaf.

    It is for arrays that the program has computed from its shard of the leaf, of any shape.
    """
    statistics = [Statistic(x, "sum", tuple(range(x.ndim)), held="partial") for x in arrays]
    return Request(tuple(statistics))


def global_norm(array: jax.Array) -> Request:
    """Asks for one norm over the arrays that all leaves pass together."""
    return Request((Statistic(array, "norm", ()),), is_global=True)


def each_matrix(
    function: Callable[..., jax.Array],
    array: jax.Array,
    matrices: Matrices,
    *numbers: Any,
    dtype: jax.typing.DTypeLike | None = None,
    splits: bool = False,
) -> EachMatrix:
    """Asks for a function of each matrix of an array, wherever the shards of the matrix are.

    Args:
        function: takes a matrix and `numbers` to a matrix of the same shape, and the transposed one
            to the transposed result. All leaves give the same one, so that their matrices are
            exchanged together.
        array: an array of the shape of the leaf.
        matrices: which of its axes are rows and columns, from `matrices_of`.
        *numbers: of this step, such as a small number to add; the same for all leaves.
        dtype: in which the function is given its matrix and `numbers`, and the devices exchange
            matrices; None for the leaf's accumulation dtype.
        splits: whether the function also takes `group=` (a `DeviceGroup`).
            Several devices then share each large matrix, if there are fewer than devices. The
            matrix lies on its long side, and each device has some of its columns, in any order,
            and columns of zeros.
    """
    return EachMatrix(array, numbers, MatrixFunction(function, matrices, dtype, splits))


def materialize(
    array: jax.Array,
    dtype: jax.typing.DTypeLike | None = None,
) -> Materialize:
    """Asks for an array to be written to memory, in `dtype` or the leaf's accumulation dtype.

    The answer is the array as it was written. Ask for arrays that go into the state, so that this
    step works with the numbers that the next one will read. Arrays that are not written are
    computed again wherever they are needed. For work on single elements, that is cheaper than
    memory.
    """
    return Materialize(array, dtype)


REQUESTS = (Request, Hoist, EachMatrix, Materialize)

LeafProgram = Generator[Request | Hoist | EachMatrix | Materialize, Any, tuple[jax.Array, Any]]


class Run(NamedTuple):
    """A run of a leaf program, as the engine sees it."""

    path: Path = ()
    """The position of its transform among those that it is combined with."""
    is_first: bool = False
    """Whether it is the first run, in which all that the program returns is checked."""

    def inside(self, member: str | int) -> "Run":
        """The run of a transform inside this one."""
        return self._replace(path=(*self.path, member))


class Leaf(NamedTuple):
    """What a leaf program is given with the gradient."""

    param: Any
    """The parameter, or None when `update` was called without parameters."""
    start: Any
    """The parameter at the start of the step: `param`, unless a transform has moved it."""
    state: Any
    """The transform's state, with the value of this leaf in each field."""
    scalars: Any
    """The transform's scalars of this step."""
    choice: Any
    """The transform's choice for this leaf when it was traced, such as a mask's boolean."""
    stacked: Axes
    """The axes of the leaf that run over its blocks, such as layers."""
    run: Run = Run()
    """For transforms that run others, which hand it on; a program of one's own ignores it."""


def in_parallel(*programs: LeafProgram) -> Generator[Any, Any, list[Any]]:
    """Runs several programs for the same leaf side by side, as one program.

    The statistics of one round are taken together for all programs.
    """
    results: dict[int, Any] = {}
    waiting: dict[int, Request] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))
    while answers:
        for index, answer in answers.items():
            try:
                request = programs[index].send(answer)
                while not isinstance(request, Request) or request.is_global:
                    request = programs[index].send((yield request))
                waiting[index] = request
            except StopIteration as end:
                results[index] = end.value
        answers = {}
        if waiting:
            of_all = iter((yield in_one_round(*waiting.values())))
            for index, request in waiting.items():
                answers[index] = [next(of_all) for _ in request.statistics]
            waiting = {}
    return [results[index] for index in range(len(programs))]
