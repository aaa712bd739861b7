"""The requests of a leaf program while it runs, and their answers.

A leaf program works on one leaf. Where it needs to know something of the whole block, it yields a
request and gets the answer back::

    param_norm, update_norm = yield block_norms(at.param, update)

All leaves make their requests in rounds, and a round of a whole network travels between devices as
one vector.
"""

from collections.abc import Callable, Generator
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch.params.matrices import Matrices

Kind = Literal["norm", "rms", "sum", "mean"]

Path = tuple[str | int, ...]
"""The place of a transform among those that it is combined with: numbers in chains and sums, names
in partitions; from the outside inwards."""

Held = Literal["sharded", "replicated", "partial"]
"""What the devices that share a leaf have of an array: parts of it, copies of it, or terms. The
array is then the sum of its terms."""


class Statistic(NamedTuple):
    """A statistic of one array that a leaf program asks for."""

    array: jax.Array
    kind: Kind
    kept: tuple[int, ...] | None = None
    """The axes that are not summed over, which keep their place in the answer; None for the axes of
    the leaf that run over its blocks."""
    held: Held = "sharded"


@dataclasses.dataclass(frozen=True)
class Request:
    """A round of statistics, answered by a list with one array for each.

    An answer is a number, or has all axes of the leaf if the statistic keeps some, so that it
    broadcasts.
    """

    statistics: tuple[Statistic, ...]
    is_global: bool = False
    asker: Path | None = None
    """The place of the transform that asks, among those that it is combined with."""

    def of(self, at: "Leaf") -> "Request":
        """The request as a transform makes it at a leaf, whose stacked axes are kept.

        Axes and places that are known already come from a transform inside this one.
        """
        own = (x._replace(kept=at.stacked) if x.kept is None else x for x in self.statistics)
        asker = at.path if self.asker is None else self.asker
        return dataclasses.replace(self, statistics=tuple(own), asker=asker)


class EachMatrix(NamedTuple):
    """A request to work on whole matrices, answered by an array like the one handed in."""

    array: jax.Array
    matrices: Matrices
    function: Callable[..., jax.Array]
    numbers: tuple[Any, ...]
    """What the function is given after its matrix."""
    dtype: jax.typing.DTypeLike | None
    splits: bool = False
    """Whether the function takes `group=` and a matrix that a group of devices shares."""
    of_whole: bool = False
    """Whether every device has the whole array, although the leaf is split."""

    @property
    def without_arrays(self) -> "OnMatrices":
        """The work, without what it is done on."""
        matrices = self.matrices.whole if self.of_whole else self.matrices
        return OnMatrices(self.function, matrices, self.dtype, self.splits)

    def given(self, dtype: jnp.dtype) -> list[jax.Array]:
        """The array whose matrices are worked on, and numbers for them."""
        own = (self.array, *self.numbers)
        return [jnp.asarray(x, self.dtype or dtype) for x in own]


class OnMatrices(NamedTuple):
    """The work on each matrix of an array."""

    function: Callable[..., jax.Array]
    matrices: Matrices
    dtype: jax.typing.DTypeLike | None
    splits: bool


class Hoist(NamedTuple):
    """Numbers of blocks, answered by themselves, and known before the last pass over the leaf."""

    values: tuple[jax.Array, ...]


class Materialize(NamedTuple):
    """A request to write an array to memory, answered by the array as written."""

    array: jax.Array
    dtype: jax.typing.DTypeLike | None


def block_norms(*arrays: jax.Array, kept: tuple[int, ...] | None = None) -> Request:
    """Asks for the norms of the blocks of arrays of one leaf.

    Args:
        *arrays: arrays of the shape of the leaf.
        kept: the axes that are not summed over; None for those that the transform calls `stacked`.
    """
    return Request(tuple(Statistic(array, "norm", kept) for array in arrays))


def block_rms(*arrays: jax.Array, kept: tuple[int, ...] | None = None) -> Request:
    """Asks for the root mean squares of the blocks of arrays of one leaf; see `block_norms`."""
    return Request(tuple(Statistic(array, "rms", kept) for array in arrays))


def block_means(*arrays: jax.Array, kept: tuple[int, ...] | None = None) -> Request:
    """Asks for the means of the blocks of arrays of one leaf; see `block_norms`."""
    return Request(tuple(Statistic(array, "mean", kept) for array in arrays))


def block_sums(*arrays: jax.Array, kept: tuple[int, ...] | None = None) -> Request:
    """Asks for the sums of the blocks of arrays of one leaf; see `block_norms`."""
    return Request(tuple(Statistic(array, "sum", kept) for array in arrays))


def together(*requests: Request) -> Request:
    """Asks for the statistics of several requests in one round.

    Args:
        *requests: requests of one leaf, such as `block_norms(x, y)` and `block_sums(x * y)`.
    """
    return Request(tuple(x for own in requests for x in own.statistics))


def hoist(*values: jax.Array) -> Hoist:
    """Asks for numbers of blocks to be known before the last pass over the leaf.

    Ask for what follows from answers alone and is used for each element, such as a trust ratio, and
    for new numbers of the state. The answer is the numbers themselves. On a GPU, numbers that
    nobody asks for are computed again in the kernels of each leaf, or in kernels of their own.

    Args:
        *values: numbers that follow from answers, scalars and numbers of the state.
    """
    return Hoist(values)


def sums_over_devices(*arrays: jax.Array) -> Request:
    """Asks for the sums of arrays over the devices that have parts of the leaf.

    It is for arrays that the program has computed from its part of the leaf, of any shape.
    """
    kept = (tuple(range(x.ndim)) for x in arrays)
    columns = zip(arrays, kept, strict=True)
    return Request(tuple(Statistic(x, "sum", axes, held="partial") for x, axes in columns))


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
    """Asks for a function of each matrix of an array, wherever the parts of the matrix are.

    Args:
        function: takes a matrix and `numbers` to a matrix of the same shape, and the transposed one
            to the transposed result. All leaves give the same one, so that their matrices are
            exchanged together.
        array: an array of the shape of the leaf.
        matrices: which of its axes are rows and columns, from `matrices_of`.
        *numbers: of this step, such as a small number to add; the same for all leaves.
        dtype: in which the function is given its matrix and `numbers`, and the devices exchange
            matrices; None for the leaf's accumulation dtype.
        splits: whether the function also takes `group=` (a `Group` of `engine.matrices.groups`) and
            then a matrix that lies on its long side, of which each device of the group has some
            columns, whichever, and columns of zeros. Large matrices of which there are fewer than
            devices are worked on so.
    """
    return EachMatrix(array, matrices, function, numbers, dtype, splits)


def materialize(array: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> Materialize:
    """Asks for an array to be written to memory, in `dtype` or the leaf's accumulation dtype.

    The answer is the array as it was written. Ask for arrays that go into the state, so that this
    step works with the numbers that the next one will read. Arrays that are not written are
    computed again wherever they are needed. For work on single elements, that is cheaper than
    memory.
    """
    return Materialize(array, dtype)


LeafProgram = Generator[Request | Hoist | EachMatrix | Materialize, Any, tuple[jax.Array, Any]]


class Leaf(NamedTuple):
    """The inputs of a leaf program besides the gradient."""

    param: Any
    """The parameter, or None when `update` was called without parameters."""
    start: Any
    """The parameter at the start of the step: `param`, unless a transform has moved it."""
    state: Any
    """The transform's state, with this leaf's part in each field."""
    scalars: Any
    """The transform's scalars of this step."""
    choice: Any
    """The transform's choice for this leaf when it was traced, such as a mask's boolean."""
    stacked: tuple[int, ...]
    """The axes of the leaf that run over its blocks, such as layers."""
    path: Path = ()
    """The place of the transform among those that it is combined with."""


def in_parallel(*programs: LeafProgram) -> Generator[Any, Any, list[tuple[jax.Array, Any]]]:
    """Runs several programs for the same leaf side by side, as one program.

    The statistics of one round are taken together for all programs.
    """
    results: dict[int, tuple[jax.Array, Any]] = {}
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
            given = iter((yield together(*waiting.values())))
            answers = {i: [next(given) for _ in asked.statistics] for i, asked in waiting.items()}
            waiting = {}
    return [results[index] for index in range(len(programs))]
