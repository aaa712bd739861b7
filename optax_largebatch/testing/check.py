"""A check of a transform of your own: whether it does the same however it is run.

A leaf program is run on parts of its leaf, side by side with other leaves, again for each pass over
memory, and on each of many devices. No error can tell that a program needs the whole leaf and gets
a part. But the numbers do.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
from jax import experimental
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from optax_largebatch.engine.blocks import VectorOfBlocks
from optax_largebatch.engine.execution_plans import ONE_CPU, ONE_GPU, ONE_TPU, SEVERAL_DEVICES
from optax_largebatch.engine.executor import Execution
from optax_largebatch.engine.program import LeafArrays, PassInputs, Program, Scalars, Suspension
from optax_largebatch.engine.requests import EachMatrix, Request
from optax_largebatch.engine.state import Field, Shared
from optax_largebatch.engine.step import Arrays, StaticInfo, Step
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.norms import cast, other_axes
from optax_largebatch.params.leaves import gradients_of
from optax_largebatch.params.owners import owners
from optax_largebatch.params.shapes import Axes, Shape
from optax_largebatch.params.stacked import Stacked, stacked_layers
from optax_largebatch.testing.reference import reference

WORTH_STORING = 80
"""The operations in float32 that an H100 does while it reads one number from memory."""

NUMBERS = 1000
"""The elements from which a leaf has more work than the numbers of the step."""

PLANS = {
    "one CPU": ONE_CPU,
    "one GPU": ONE_GPU,
    "one TPU": ONE_TPU,
    "several devices": SEVERAL_DEVICES,
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
    `reference`: as they run on each kind of device, on parts of each leaf if the transform says
    `given="parts"`, and on two devices, if there are two, that share one axis after the other. If
    it is given a function of `stacked`, layers that are stacked in one array, along the first and
    along the last axis, are compared with layers in separate arrays: their updates, and the numbers
    for each layer in the state. It also finds fields that are `Shared` and differ from leaf to
    leaf, work that each pass does again although a stored result would cost less, and a missing
    `needs_params=True`.

    Args:
        transform: the transformation, made of leaf transforms; or a function that makes it and
            takes what `stacked_layers` gives, by the name `stacked` or as its only argument.
        params: small parameters of the kinds that it is for, without stacks: say, two biases and a
            matrix of 48 x 32. Two of them must have the same shape, because identical leaves may
            take their passes together. Sizes are even, so that two devices can share them, and a
            matrix has 1000 elements or more: in a smaller one work that is done again may not be
            seen.

    Raises:
        ValueError: the transform does not do the same. The message says where, and what to do.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_trust_ratio
        >>> from optax_largebatch.testing import check
        >>> params = {"bias": jnp.ones(6), "kernel": jnp.ones((4, 6)), "scale": jnp.ones(6)}
        >>> check(lambda stacked: scale_by_trust_ratio(stacked=stacked), params)
    """
    shapes = [jnp.shape(x) for x in jax.tree.leaves(params)]
    if len(set(shapes)) == len(shapes):
        raise ValueError(
            "params must hold two arrays of the same shape, because identical leaves may take "
            f"their passes together; got the shapes {', '.join(map(str, shapes))}. Add another "
            "array of one of these shapes."
        )
    with _float64_on_the_cpu():
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda x: cast(jnp.asarray(x), "float64"), params)

        def drawn(x: jax.Array) -> jax.Array:
            factor = 1 + 2j if jnp.iscomplexobj(x) else 1
            return jnp.asarray(factor * random.normal(size=x.shape))

        gradients = jax.tree.map(drawn, params)
        if isinstance(transform, optax.GradientTransformation):
            _check_one(transform, gradients, params)
        else:
            by_name = "stacked" in inspect.signature(transform).parameters

            def make(stacked: Stacked) -> optax.GradientTransformation:
                named: Any = transform
                return named(stacked=stacked) if by_name else transform(stacked)

            _check_one(make(stacked_layers({})), gradients, params)
            for axis in (0, -1):
                _check_stacks(make, axis, gradients, params)


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


def _check_one(
    transform: optax.GradientTransformation,
    gradients: Any,
    params: Any,
) -> None:
    """Checks the third step of a transform."""
    leaf_transform: Any = leaf_transform_of(transform)
    if leaf_transform is None:
        raise TypeError(
            f"check() takes one made of leaf transforms, got {transform!r}. Of a partition or a "
            "wrapper, check the transforms that it is made of."
        )
    specification = reference(transform)
    state = transform.init(params)
    for k in range(2):
        before = jax.tree.map(lambda x, k=k: (0.5 + k) * jnp.cos(x), gradients)
        _, state = specification.update(before, state, params)
    expected = specification.update(gradients, state, params)
    name = leaf_transform.name
    if not leaf_transform.needs_params:
        # A program that fails with parameters, too, has failed above, with an error of its own.
        try:
            specification.update(gradients, specification.init(params))
        except Exception as error:
            raise ValueError(
                f"{name}: without parameters it ends with an error, and `update` may be called so. "
                "Say LeafTransform(..., needs_params=True) if the leaf program uses `at.param`."
            ) from error
    leaves, arrays = gradients_of(gradients, params)
    step = Step(leaf_transform, StaticInfo.of(leaf_transform, leaves))
    inputs = Arrays(arrays, state, leaves.arrays, Scalars(leaf_transform.scalars(state)))
    _check_programs(leaf_transform, step, inputs)
    for devices, plan in PLANS.items():
        updates, new = _compiled(functools.partial(step.run, plan))(inputs)
        message = f"{name}: as it runs on {devices}, it gives other numbers than its reference."
        _compare((leaves.rebuild(updates), new), expected, message)
    for axis in range(max(x.ndim for x in leaves.arrays)):
        for results in _on_two_devices(transform, axis, gradients, state, params):
            message = f"{name}: with axis {axis} split between devices, it gives other numbers."
            _compare(results, expected, message)


def _check_programs(
    transform: LeafTransform,
    step: Step,
    arrays: Arrays,
) -> None:
    """Checks what the leaf programs compute in each of their passes."""
    leaves, _, by_leaf = step.by_leaf(arrays)
    programs = step.programs(by_leaf, arrays.scalars, leaves)
    execution = Execution(programs, by_leaf, arrays.scalars, SEVERAL_DEVICES)
    results = execution.results()
    same: dict[Any, Any] = {}
    for batch in execution.batches:
        ((i, leaf),) = batch.leaves.items()
        for who, field, value in _fields(transform, results[i][1]):
            if isinstance(field, Shared):
                message = (
                    f"{who}: the state's field {field.name!r} is Shared, and its new value "
                    f"{SAME_FOR_ALL}declare it as PerParameter(), NumberPerBlock() or "
                    "VectorOfBlocks()."
                )
                _compare(value, same.setdefault((who, field.name), value), message)
        passes = _Passes(transform.name, batch.program, leaf, arrays.scalars, batch.inputs)
        for _, stop in passes.each():
            if isinstance(stop.request, EachMatrix):
                expected = same.setdefault(stop.request.on.function, stop.request.numbers)
                message = (
                    f"{transform.name}: a number given to each_matrix {SAME_FOR_ALL}give those "
                    "leaves another function: the matrices of one function are worked on together."
                )
                _compare(stop.request.numbers, expected, message)
        if batch.program.tileable:
            passes.check_kept()
            passes.check_tiles()
        passes.check_work()


def _fields(
    transform: LeafTransform,
    state: Any,
) -> Iterator[tuple[str, Field, Any]]:
    """All fields of a state, also of a leaf: the transform's name, the field and its value."""
    for field, value in zip(transform.state, state, strict=True):
        yield transform.name, field, value
        for inner, inner_state in field.inside(value):
            yield from _fields(inner, inner_state)


class _Passes(NamedTuple):
    """The passes over a leaf."""

    name: str
    """The name of the transform."""
    program: Program
    leaf: LeafArrays
    scalars: Scalars
    last: PassInputs
    """The inputs of the last pass."""

    def each(self) -> Iterator[tuple[PassInputs, Suspension]]:
        """The inputs of each pass, and where the pass stops."""
        inputs = PassInputs()
        for answers in self.last.answers:
            stop = self.program.run(self.leaf, self.scalars, inputs)
            yield inputs, stop
            inputs = inputs.after(stop.stored, answers)
        yield inputs, self.program.run(self.leaf, self.scalars, inputs)

    def check_kept(self) -> None:
        """Checks that a program of tiles has an answer for each block, and none for its rows."""
        stacked = self.program.static.blocks.axes
        kept = {x.kept for of_round in self.program.rounds for x in of_round.statistics}
        for axes in kept - {stacked, ()}:
            raise ValueError(
                f"{self.name}: the leaf program says given='parts' and asks for sums that keep the "
                f"axes {axes}, where the stacked ones are {stacked}. A part of the leaf would need "
                "a part of the answer: say given='whole' or 'shards'."
            )

    def check_tiles(self) -> None:
        """Checks that passes over tiles of the leaf compute what they do over all of it."""
        shape = self.leaf.gradient.shape
        message = (
            f"{self.name}: the leaf program says given='parts', and gives other numbers for parts "
            f"of a leaf of shape {shape} than for all of it. Ask for sums, means and norms by "
            "`yield block_sums(...)` and its like, choose by `at.choice` in place of the shape or "
            "`ndim` of the part, or say given='whole'."
        )
        for cut, joined in _cuts(shape, self.program.static.blocks.axes):
            for inputs, stop in self.each():
                try:
                    of_tiles = [*self._of_tiles(cut, inputs)]
                except Exception as error:
                    raise ValueError(message) from error
                for whole, *tiles in zip(_arrays(stop), *of_tiles, strict=True):
                    for result in [joined(tiles)] if whole.shape == shape else tiles:
                        _compare(result, whole, message)

    def _of_tiles(
        self,
        cut: Callable[..., Any],
        inputs: PassInputs,
    ) -> Iterator[list[jax.Array]]:
        """What a pass over each tile of the leaf computes."""
        arrays, with_arrays = self.program.arrays_of(self.leaf)
        whole, structure = jax.tree.flatten((arrays, inputs))
        for tile in zip(*map(cut, whole), strict=True):
            arrays, inputs = structure.unflatten(tile)
            yield _arrays(self.program.run(with_arrays(arrays), self.scalars, inputs))

    def check_work(self) -> None:
        """Checks that what passes do again takes less time than to read a stored result."""

        def one_pass(
            leaf: LeafArrays,
            scalars: Scalars,
            inputs: PassInputs,
        ) -> Any:
            return _arrays(self.program.run(leaf, scalars, inputs))

        def all_passes(
            leaf: LeafArrays,
            scalars: Scalars,
            last: PassInputs,
        ) -> Any:
            passes = self._replace(leaf=leaf, scalars=scalars, last=last)
            return [_arrays(stop) for _, stop in passes.each()]

        once = _work(all_passes, self.leaf, self.scalars, self.last)
        of_passes = sum(_work(one_pass, self.leaf, self.scalars, x) for x, _ in self.each())
        if of_passes - once > WORTH_STORING * max(self.leaf.gradient.size, NUMBERS):
            raise ValueError(
                f"{self.name}: for a leaf of shape {self.leaf.gradient.shape}, work is done again "
                "in each pass that takes longer than to read its result. Store that, by "
                "`x = yield materialize(x)`, before the next request."
            )


def _cuts(shape: Shape, kept: Axes) -> Iterator[tuple[Callable, Callable]]:
    """Ways to cut a leaf: functions that cut an array, and put the tiles together again.

    Numbers of blocks, which have other shapes, go with each tile.
    """

    def cut(axis: int, x: jax.Array) -> list[jax.Array]:
        third = -(-shape[axis] // 3)
        return jnp.split(x, [third], axis) if x.shape == shape else [x, x]

    for axis in other_axes(len(shape), kept):
        if shape[axis] > 1:
            yield functools.partial(cut, axis), functools.partial(jnp.concatenate, axis=axis)
    if kept == tuple(range(len(kept))):  # each block is a row, as in tiles
        rows = math.prod(shape[: len(kept)])
        yield (
            lambda x: [x.reshape(rows, -1) if x.ndim else x],
            lambda tiles: tiles[0].reshape(shape),
        )


def _arrays(stop: Suspension) -> list[jax.Array]:
    """All that a pass computes."""
    request: Any = stop.request
    requested: list[Any] = []
    if isinstance(request, Request):
        requested = [x.array for x in request.statistics]
    elif isinstance(request, EachMatrix):
        requested = [request.array, *request.numbers]
    computed = stop._replace(request=requested)
    return list(map(jnp.asarray, jax.tree.leaves(computed)))


def _work(function: Callable[..., Any], *arguments: Any) -> float:
    """The operations of a compiled function; a call of a library counts as very many."""
    compiled: Any = jax.jit(function).lower(*arguments).compile()
    analysis = compiled.cost_analysis()
    return analysis.get("flops", 0.0) + 1e9 * compiled.as_text().count(" custom-call(")


def _on_two_devices(
    transform: Any,
    axis: int,
    gradients: Any,
    state: Any,
    params: Any,
) -> Iterator[tuple[Any, Any]]:
    """A step under `jit` on a mesh, and one in `jax.shard_map`, which is given shards.

    Two devices share this axis of each parameter that has it, and even.
    """
    mesh = Mesh(jax.local_devices(backend="cpu")[:2], "d")
    leaves, structure = jax.tree.flatten(params)
    specs = []
    for x in leaves:
        is_shared = axis < x.ndim and x.shape[axis] % 2 == 0
        specs.append(PartitionSpec(*[None] * axis, "d") if is_shared else PartitionSpec())
    shardings = structure.unflatten([NamedSharding(mesh, spec) for spec in specs])
    arrays = jax.device_put((gradients, params), (shardings, shardings))
    step = _compiled(functools.partial(transform.update, partition_specs=shardings))
    yield step(arrays[0], state, arrays[1])
    if not hasattr(jax, "shard_map"):  # jax 0.6.0
        return
    of_state = [
        PartitionSpec() if owner is None or x.shape != leaves[owner].shape else specs[owner]
        for x, owner in zip(jax.tree.leaves(state), owners(state, params), strict=True)
    ]
    of_params = structure.unflatten(specs)
    of_all = of_params, jax.tree.structure(state).unflatten(of_state)
    step = jax.shard_map(
        functools.partial(transform.update, partition_specs=of_params),
        mesh=mesh,
        in_specs=(*of_all, of_params),
        out_specs=of_all,
        check_vma=False,
    )
    yield _compiled(step)(gradients, state, params)


def _check_stacks(
    make: Callable[[Stacked], Any],
    axis: int,
    gradients: Any,
    params: Any,
) -> None:
    """Checks two steps of two layers in one array, against layers in separate arrays."""
    layer = gradients, params
    layers = [layer, jax.tree.map(lambda x: 3 * x + 0.1, layer)]

    def in_one(trees: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x, axis), *trees)

    transform = make(stacked_layers(axis))
    stacked, state = _second_step(transform, *in_one(layers))
    unstacked = make(stacked_layers({}))
    separate, separate_state = _second_step(unstacked, *zip(*layers, strict=True))
    message = (
        f"{transform!r}: layers stacked in one array, along axis {axis}, get other {{}} than "
        "layers in separate arrays. Say LeafTransform(..., stacked=stacked), and look at "
        "`at.stacked` where the leaf program uses axes, as in `kept=`, or sizes."
    )
    _compare(stacked, in_one(separate), message.format("updates"))
    vectors = _of_blocks(transform, state)
    of_separate = _of_blocks(unstacked, separate_state)
    for vector, expected in zip(vectors, of_separate, strict=True):
        each = expected.reshape(len(layers), -1).T  # for each parameter the numbers of its layers
        if vector.size == len(each):  # one for each parameter, and not for each layer
            vector = np.repeat(vector, len(layers))
        _compare(vector, each, message.format("numbers for each layer in the state"))


def _of_blocks(transform: Any, state: Any) -> list[np.ndarray]:
    """The vectors of a state with a number for each block."""
    leaf_transform: Any = leaf_transform_of(transform)
    fields = _fields(leaf_transform, state)
    return [np.asarray(value) for _, field, value in fields if isinstance(field, VectorOfBlocks)]


def _second_step(
    transform: Any,
    gradients: Any,
    params: Any,
) -> tuple[Any, Any]:
    """A second step, with the gradients of the first."""
    update = _compiled(transform.update)
    _, state = update(gradients, transform.init(params), params)
    return update(gradients, state, params)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is compiled quickly, since it runs so briefly."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _compare(results: Any, expected: Any, message: str) -> None:
    """Compares two trees of arrays, whose numbers may have other axes of length 1."""
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        x = np.ravel(x)
        y = np.ravel(y)
        atol = 1e-6 * np.max(np.abs(y), initial=0.0)
        if x.shape != y.shape or not np.allclose(x, y, rtol=1e-6, atol=atol, equal_nan=True):
            raise ValueError(message)
