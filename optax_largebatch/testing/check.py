"""A check of a transform of your own: whether it does the same however it is run.

A leaf program is run on parts of its leaf, beside other leaves, again for each pass over memory,
and on each of many devices. No error can tell that a program needs the whole leaf where it gets a
part. But the numbers do.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import experimental
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import optax

from optax_largebatch.engine.arrays import Known, LeafArrays, Scalars, Stop
from optax_largebatch.engine.executor import Execution
from optax_largebatch.engine.passes import differs_by_leaf
from optax_largebatch.engine.places import ONE_CPU, ONE_GPU, ONE_TPU, SEVERAL
from optax_largebatch.engine.replay import Program
from optax_largebatch.engine.requests import EachMatrix, Request
from optax_largebatch.engine.state import Shared
from optax_largebatch.engine.step import Arrays, Facts, Step
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.leaves import gradients_of
from optax_largebatch.params.stacked import Stacked, stacked_layers
from optax_largebatch.testing.reference import reference

WORTH_STORING = 80
"""The operations in float32 that an H100 does while it reads one number from memory."""

NUMBERS = 1000
"""The elements from which a leaf has more work than the numbers of the step."""

PLACES = {
    "one CPU": ONE_CPU,
    "one GPU": ONE_GPU,
    "one TPU": ONE_TPU,
    "several devices": SEVERAL,
}

SAME_FOR_ALL = (
    "differs from leaf to leaf. Compute it of the step's scalars and of `yield global_norm(...)`, "
    "or "
)


def check(
    transform: optax.GradientTransformation | Callable[[Stacked], optax.GradientTransformation],
    params: optax.Params,
) -> None:
    """Checks that a transform does the same however it is run.

    It takes steps with random gradients, in float64 on the host's CPU, and compares them with
    `reference`: as they run in each kind of place, on parts of each leaf if the transform says
    `given="parts"`, on a mesh of two devices if there are two, and with layers stacked in one array
    if it is given a function of `stacked`. It also finds fields that are `Shared` and differ from
    leaf to leaf, work that each pass does again although a stored result would cost less, and a
    missing `needs_params=True`.

    Args:
        transform: the transformation, made of leaf transforms; or a function that makes it and
            takes what `stacked_layers` gives.
        params: small parameters of the kinds that it is for, without stacks: say, two biases and a
            matrix of 48 x 32. Sizes are even, so that two devices can share them.

    Raises:
        TypeError: the transformation, or a part of it, is not of this library.
        ValueError: the transform does not do the same. The message says where, and what to do.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_trust_ratio
        >>> from optax_largebatch.testing import check
        >>> params = {"bias": jnp.ones(6), "kernel": jnp.ones((4, 6))}
        >>> check(lambda stacked: scale_by_trust_ratio(stacked=stacked), params)
    """
    with _float64_on_the_cpu():
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda x: jnp.asarray(x, "float64"), params)
        gradients = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape)), params)
        if isinstance(transform, optax.GradientTransformation):
            _check_one(transform, gradients, params)
        else:
            _check_one(transform(stacked_layers({})), gradients, params)
            _check_stacks(transform, gradients, params)


@contextlib.contextmanager
def _float64_on_the_cpu() -> Iterator[None]:
    """Computes in float64, also with numbers in float32 that a program closes over."""
    where: Any = jax if hasattr(jax, "enable_x64") else experimental  # before jax 0.8
    with (
        where.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.default_device(jax.local_devices(backend="cpu")[0]),
    ):
        yield


def _check_one(transform: optax.GradientTransformation, gradients: Any, params: Any) -> None:
    """Checks the third step of a transform."""
    own: Any = leaf_transform_of(transform)
    if own is None:
        raise TypeError(
            f"check() takes one made of leaf transforms, got {transform!r}. Of a partition or a "
            "wrapper, check the transforms that it is made of."
        )
    specification = reference(transform)
    if not own.needs_params:
        _check_without_params(own.name, specification, gradients, params)
    state = transform.init(params)
    for k in range(2):
        before = jax.tree.map(lambda x, k=k: (0.5 + k) * jnp.cos(x), gradients)
        _, state = specification.update(before, state, params)
    expected = specification.update(gradients, state, params)
    leaves, arrays = gradients_of(gradients, params)
    step = Step(own, Facts.of(own, leaves, arrays))
    given = Arrays(arrays, state, leaves.arrays, Scalars(own.scalars(state)))
    _check_programs(own, step, given)
    for name, place in PLACES.items():
        updates, new = _compiled(step.taken, static_argnums=0)(place, given)
        where = f"{own.name}: as it runs on {name}, it gives other numbers than its reference."
        _compare((leaves.rebuild(updates), new), expected, where)
    on_two = _on_two_devices(transform, gradients, state, params)
    _compare(on_two, expected, f"{own.name}: split between devices, it gives other numbers.")


def _check_without_params(name: str, specification: Any, gradients: Any, params: Any) -> None:
    """Checks that a transform that does not ask for the parameters works without them."""
    try:
        specification.update(gradients, specification.init(params))
    except Exception as error:
        raise ValueError(
            f"{name}: without parameters it ends with an error, and `update` may be called so. Say "
            "LeafTransform(..., needs_params=True) if the leaf program uses `at.param`."
        ) from error


def _check_programs(transform: LeafTransform, step: Step, given: Arrays) -> None:
    """Checks what the leaf programs compute in each of their passes."""
    leaves, _, arrays = step.by_leaf(given)
    programs = step.programs_of(arrays, given.scalars, leaves)
    execution = Execution(programs, arrays, given.scalars, SEVERAL)
    results = execution.results()
    same: dict[Any, Any] = {}
    for i, program in programs.items():
        for who, name, value in transform.same_for_all(results[i][1], Shared):
            message = (
                f"{who}: the state's field {name!r} is Shared, and its new value {SAME_FOR_ALL}"
                "declare it as PerParameter(), NumberPerBlock() or VectorOfBlocks()."
            )
            _compare(value, same.setdefault((who, name), value), message)
        passes = _Passes(transform.name, program, arrays[i], given.scalars, execution.known[i])
        for _, stop in passes.each():
            if isinstance(stop.request, EachMatrix):
                numbers = same.setdefault(stop.request.function, stop.request.numbers)
                message = (
                    f"{transform.name}: a number given to each_matrix {SAME_FOR_ALL}give those "
                    "leaves a function of their own: the matrices of one are worked on together."
                )
                _compare(stop.request.numbers, numbers, message)
        if program.can_be_cut:
            passes.check_parts()
        passes.check_work()


class _Passes(NamedTuple):
    """The passes over a leaf."""

    name: str
    """The name of the transform."""
    program: Program
    leaf: LeafArrays
    scalars: Scalars
    known: Known

    def each(self) -> Iterator[tuple[Known, Stop]]:
        """What is known before each pass, and where the pass stops."""
        before = Known()
        for answers in self.known.answers:
            stop = self.program.run(self.leaf, self.scalars, before)
            yield before, stop
            before = before.after(stop.stored, answers)
        yield before, self.program.run(self.leaf, self.scalars, before)

    def check_parts(self) -> None:
        """Checks that passes over parts of the leaf compute what they do over all of it."""
        shape = self.leaf.gradient.shape
        message = (
            f"{self.name}: the leaf program says given='parts', and gives other numbers for parts "
            f"of a leaf of shape {shape} than for all of it. Ask for sums, means and norms by "
            "`yield block_sums(...)` and its like, or say given='whole'."
        )
        for cut, joined in _cuts(shape, self.program.choice.stacked):
            pieces = range(len(cut(self.leaf.gradient)))
            for before, stop in self.each():
                try:
                    parts = [self._of_part(cut, k, before) for k in pieces]
                except Exception as error:
                    raise ValueError(message) from error
                for whole, *own in zip(_arrays(stop), *parts, strict=True):
                    for found in [joined(own)] if whole.shape == shape else own:
                        _compare(found, whole, message)

    def _of_part(self, cut: Callable[..., Any], k: int, before: Known) -> list[jax.Array]:
        """What a pass over a part of the leaf computes."""

        def part(x: jax.Array) -> jax.Array:
            return cut(x)[k]

        everything, structure = jax.tree.flatten(self.leaf)
        columns = zip(everything, differs_by_leaf(self.program, self.leaf), strict=True)
        leaf = structure.unflatten(part(x) if like else x for x, like in columns)
        return _arrays(self.program.run(leaf, self.scalars, jax.tree.map(part, before)))

    def check_work(self) -> None:
        """Checks that what passes do again takes less time than to read a stored result."""

        def one(leaf: LeafArrays, scalars: Scalars, before: Known) -> Any:
            return _arrays(self.program.run(leaf, scalars, before))

        def together(leaf: LeafArrays, scalars: Scalars, known: Known) -> Any:
            passes = self._replace(leaf=leaf, scalars=scalars, known=known)
            return [_arrays(stop) for _, stop in passes.each()]

        once = _work(together, self.leaf, self.scalars, self.known)
        again = sum(_work(one, self.leaf, self.scalars, x) for x, _ in self.each()) - once
        if again > WORTH_STORING * max(self.leaf.gradient.size, NUMBERS):
            raise ValueError(
                f"{self.name}: for a leaf of shape {self.leaf.gradient.shape}, work is done again "
                "in each pass that takes longer than to read its result. Store that, by "
                "`x = yield materialize(x)`, before the next request."
            )


def _cuts(shape: tuple[int, ...], kept: tuple[int, ...]) -> Iterator[tuple[Callable, Callable]]:
    """Ways to cut a leaf: functions that cut an array, and put the parts together again.

    Numbers of blocks, which have other shapes, go with each part.
    """
    for axis in (k for k, size in enumerate(shape) if size > 1 and k not in kept):
        at = [-(-shape[axis] // 3)]
        yield (
            lambda x, axis=axis, at=at: jnp.split(x, at, axis) if x.shape == shape else [x, x],
            lambda parts, axis=axis: jnp.concatenate(parts, axis),
        )
    if kept == tuple(range(len(kept))):  # each block is a row, as in tiles
        rows = math.prod(shape[: len(kept)])
        yield (
            lambda x: [x.reshape(rows, -1) if x.ndim else x],
            lambda parts: parts[0].reshape(shape),
        )


def _arrays(stop: Stop) -> list[jax.Array]:
    """All that a pass computes."""
    request = stop.request
    asked = [x.array for x in request.statistics] if isinstance(request, Request) else []
    on_matrices = [request.array, *request.numbers] if isinstance(request, EachMatrix) else []
    everything = stop.stored, stop.numbers, asked, on_matrices, stop.result
    return list(map(jnp.asarray, jax.tree.leaves(everything)))


def _work(function: Callable[..., Any], *arguments: Any) -> float:
    """The operations of a compiled function; a call of a library counts as very many."""
    compiled: Any = jax.jit(function).lower(*arguments).compile()
    analysis = compiled.cost_analysis()
    return analysis.get("flops", 0.0) + 1e9 * compiled.as_text().count(" custom-call(")


def _on_two_devices(transform: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """A step on a mesh of two devices, which share each parameter that has an even size."""
    devices = jax.local_devices(backend="cpu")[:2]
    mesh = jax.make_mesh((len(devices),), ("d",), axis_types=(AxisType.Auto,), devices=devices)

    def sharding(x: jax.Array) -> NamedSharding:
        even = next((axis for axis, size in enumerate(x.shape) if size % 2 == 0), None)
        spec = [] if even is None else [None] * even + ["d"]
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = jax.tree.map(sharding, params)
    arrays = jax.device_put((gradients, params), (shardings, shardings))
    step = _compiled(functools.partial(transform.update, partition_specs=shardings))
    return step(arrays[0], state, arrays[1])


def _check_stacks(make: Callable[[Stacked], Any], gradients: Any, params: Any) -> None:
    """Checks two steps of two layers in one array, against layers in arrays of their own."""
    layers = [(gradients, params), jax.tree.map(lambda x: 3 * x + 0.1, (gradients, params))]
    apart = _second_updates(make(stacked_layers({})), *zip(*layers, strict=True))
    transform = make(stacked_layers(0))
    stacked = _second_updates(transform, *jax.tree.map(lambda *x: jnp.stack(x), *layers))
    _compare(
        stacked,
        jax.tree.map(lambda *x: jnp.stack(x), *apart),
        f"{transform!r}: layers stacked in one array get other updates than layers in arrays of "
        "their own. Say LeafTransform(..., stacked=stacked), and look at `at.stacked` where the "
        "leaf program uses axes or sizes.",
    )


def _second_updates(transform: Any, gradients: Any, params: Any) -> Any:
    """The updates of a second step, with the gradients of the first."""
    update = _compiled(transform.update)
    _, state = update(gradients, transform.init(params), params)
    updates, _ = update(gradients, state, params)
    return updates


def _compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A function that is compiled quickly, since it runs so briefly."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **settings)


def _compare(found: Any, expected: Any, message: str) -> None:
    """Compares two trees of arrays, whose numbers may have other axes of length 1."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = np.ravel(x), np.ravel(y)
        size = np.max(np.abs(y), initial=0.0)
        if x.shape != y.shape or not np.allclose(x, y, rtol=1e-6, atol=1e-6 * size, equal_nan=True):
            raise ValueError(message)
