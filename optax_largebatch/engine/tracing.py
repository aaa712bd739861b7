"""A leaf program, traced once: its equations, and the arrays between its passes."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Literal, Var
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.requests import EachMatrix, Held, Kind, Leaf, Materialize, Statistic
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.state import Counter, Shared
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.matrices import Matrices

ROOTS = ("norm", "rms")
"""The kinds of statistics that are roots of a sum of squares."""

MEANS = ("mean", "rms")
"""The kinds of statistics that are divided by the number of elements."""

Splits = Callable[[tuple[int, ...]], norms.Split]
"""How a leaf is split between devices, by the axes that are kept."""


class LeafArrays(NamedTuple):
    """The arrays that the program of one leaf starts from."""

    gradient: jax.Array
    param: jax.Array | None
    state: Any


class OnMatrices(NamedTuple):
    """The work on each matrix of an array that a leaf program asks for."""

    function: Callable[..., jax.Array]
    matrices: Matrices


class Asked(NamedTuple):
    """A requested statistic, as far as it is known when it is traced."""

    kind: Kind
    kept: tuple[int, ...]
    held: Held
    split: norms.Split
    elements: int
    """The number of elements that a block has on this device."""


class Round(NamedTuple):
    """A request, as far as it is known when it is traced; without repeated statistics."""

    of_all_leaves: bool
    asked: tuple[Asked, ...]
    on_matrices: OnMatrices | None = None
    """The work on matrices, if the round is that and no statistics."""


@dataclasses.dataclass
class Trace:
    """The equations of a leaf program and the variables that mean something in it."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    rounds: tuple[Round, ...]
    handed_in: list[list[Any]]
    """The array of each statistic, by round; or that with the matrices, and numbers for them."""
    answers: list[list[Any]]
    """The sum or mean that answers each statistic, before any root is taken."""
    worked_on: list[list[Any]]
    """The results of work on matrices, by round."""
    stored: list[list[Any]]
    """The arrays materialized before each round, and last those after all rounds."""
    result: Any
    """The update and the new state."""
    old_state: list[Any]
    """The inputs of the state with an element for each element of the leaf."""
    like_leaf: list[Any]
    """The inputs with an element for each element of the leaf."""
    of_blocks: list[Any]
    """The inputs with a number for each block of it."""
    new_of_blocks: list[Any]
    """The new values of these."""
    same_for_all: list[tuple[str, str, Any]]
    """The new values of shared fields, with the names of their transforms and their own."""
    same_inputs: list[Any]
    """The inputs that are the same for all leaves."""

    @property
    def all_stored(self) -> list[Any]:
        """The materialized arrays, in the order of the passes."""
        return list(itertools.chain(*self.stored))

    @property
    def all_answers(self) -> list[Any]:
        """The answers of all rounds."""
        return list(itertools.chain(*self.answers))

    @property
    def all_worked_on(self) -> list[Any]:
        """The results of work on matrices, of all rounds."""
        return list(itertools.chain(*self.worked_on))

    def needed(self, targets: Iterable[Any], known: Iterable[Any]) -> list[Any]:
        """The equations that lead to variables from those that are known."""
        known = set(variables(known))
        wanted = {*variables(targets)} - known
        needed = []
        for equation in reversed(self.jaxpr.eqns):
            if not wanted.isdisjoint(equation.outvars):
                needed.append(equation)
                wanted |= {*variables(equation.invars)} - known
        return needed[::-1]

    def inputs_of(self, target: Any) -> set[Any]:
        """The inputs that a variable is computed from, not counting what answers were."""
        needed = self.needed([target], [*self.all_answers, *self.all_worked_on])
        return {*variables(itertools.chain([target], *(x.invars for x in needed)))}

    def of_pass(self, position: int) -> list[Any]:
        """The equations of the pass before a round, or of the last one."""
        last = position == len(self.rounds)
        targets = jax.tree.leaves(self.result) if last else self.handed_in[position]
        before = (own[:position] for own in (self.stored, self.answers, self.worked_on))
        known = itertools.chain.from_iterable(itertools.chain.from_iterable(before))
        return self.needed([*self.stored[position], *targets], known)

    def store(self, position: int, *targets: Any) -> None:
        """Has variables materialized by a pass, unless they are inputs or are already."""
        made = {x for own in self.jaxpr.eqns for x in own.outvars}
        for x in variables(targets):
            if x in made and all(x not in others for others in self.stored):
                self.stored[position].append(x)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among `atoms`; the others are numbers."""
    return [x for x in atoms if not isinstance(x, Literal)]


def traced(
    transform: LeafTransform,
    choice: Any,
    leaf: LeafArrays,
    scalars: Scalars,
    splits: Splits,
    dtype_of_all: jnp.dtype,
) -> Trace:
    """The trace of the program for a leaf, or for a part of one.

    Args:
        transform: the transform.
        choice: its choice for the leaf.
        leaf: the arrays of the leaf.
        scalars: the scalars of the step.
        splits: how the leaf is split between devices.
        dtype_of_all: the dtype of sums over all leaves.
    """
    rounds: list[Round] = []
    passes: list[int] = []  # for each array that is materialized the pass that does it

    def reading(leaf: LeafArrays, scalars: Scalars) -> Any:
        """The program as it reads, and what lies between its passes."""
        dtype = accumulation_dtype(leaf)
        gradient, param, state = _cast(leaf, dtype)
        at = Leaf(param, param, state, _cast(scalars.tree, dtype), choice)
        program = transform.program(gradient, at)
        stored: list[jax.Array] = []
        arrays: list[list[jax.Array]] = []
        answers: list[list[jax.Array]] = []
        worked_on: list[list[jax.Array]] = []
        answer: Any = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                own = leaf.state
                shared = shared_values(end.value[1], own)
                return end.value, stored, arrays, answers, worked_on, shared
            if isinstance(request, Materialize):
                stored.append(request.array.astype(request.dtype or dtype))
                passes.append(len(rounds))
                answer = stored[-1].astype(dtype)
                continue
            if isinstance(request, EachMatrix):
                whole = request.matrices.whole if request.of_whole else request.matrices
                rounds.append(Round(False, (), OnMatrices(request.function, whole)))
                given = request.array, *request.numbers
                arrays.append([jnp.asarray(x, request.dtype or dtype) for x in given])
                answers.append([])
                # Of what they become only the type matters here.
                worked_on.append([jnp.negative(arrays[-1][0])])
                answer = worked_on[-1][0].astype(dtype)
                continue
            worked_on.append([])
            distinct = {_identity(x): x for x in request.statistics}
            rounds.append(_round(request.of_all_leaves, distinct.values(), splits))
            arrays.append([x.array for x in distinct.values()])
            columns = zip(distinct.values(), rounds[-1].asked, strict=True)
            found = [_abstract_sum(x, own.split) for x, own in columns]
            of_all = request.of_all_leaves
            answers.append([x.astype(dtype_of_all) if of_all else x for x in found])
            given = dict(zip(distinct, answers[-1], strict=True))
            answer = [_answer(x, given[_identity(x)], dtype) for x in request.statistics]

    def shared_values(new: Any, old: Any) -> Any:
        named = transform.same_for_all(new, Shared)
        names.extend((who, name) for who, name, _ in named)
        return [value for *_, value in named], [
            x for *_, x in transform.same_for_all(old, Shared, Counter)
        ]

    names: list[tuple[str, str]] = []
    closed, shapes = jax.make_jaxpr(reading, return_shape=True)(leaf, scalars)
    outputs = jax.tree.unflatten(jax.tree.structure(shapes), closed.jaxpr.outvars)
    result, stored, handed_in, answers, worked_on, (shared, shared_inputs) = outputs
    no_state = [True] * len(jax.tree.leaves((leaf.gradient, leaf.param)))
    flags = [*no_state, *jax.tree.leaves(transform.like_leaf(leaf.state))]
    columns = list(zip(closed.jaxpr.invars, flags, strict=False))
    in_blocks = [own and x.aval.shape != leaf.gradient.shape for x, own in columns]
    new_state = _in_the_places_of(leaf.state, result[1])
    trace = Trace(
        jaxpr=closed.jaxpr,
        consts=closed.consts,
        rounds=tuple(rounds),
        handed_in=handed_in,
        answers=answers,
        worked_on=worked_on,
        stored=[[] for _ in range(len(rounds) + 1)],
        result=result,
        old_state=[
            x for x, own in columns[len(no_state) :] if own and x.aval.shape == leaf.gradient.shape
        ],
        like_leaf=[x for x, own in columns if own and x.aval.shape == leaf.gradient.shape],
        of_blocks=list(itertools.compress(closed.jaxpr.invars, in_blocks)),
        new_of_blocks=list(itertools.compress(new_state, in_blocks[len(no_state) :])),
        same_for_all=[(*name, value) for name, value in zip(names, shared, strict=True)],
        same_inputs=[*closed.jaxpr.invars[len(columns) :], *jax.tree.leaves(shared_inputs)],
    )
    for position, own in zip(passes, stored, strict=True):
        trace.store(position, own)
    return trace


def _in_the_places_of(old: Any, new: Any) -> list[Any]:
    """The new values in the places of old arrays; where the old state has None there is none."""

    def is_none(x: Any) -> bool:
        return x is None

    places, structure = jax.tree.flatten(old, is_leaf=is_none)
    values = structure.flatten_up_to(new)
    return [value for place, value in zip(places, values, strict=True) if place is not None]


def accumulation_dtype(leaf: LeafArrays) -> jnp.dtype:
    """The dtype that a leaf is computed with."""
    return norms.accumulation_dtype(
        *(x.dtype for x in (leaf.gradient, leaf.param) if x is not None)
    )


def term(statistic: Statistic) -> jax.Array:
    """The terms of a sum: the elements, or their squares for the root of a sum."""
    return jnp.square(statistic.array) if statistic.kind in ROOTS else statistic.array


def _identity(statistic: Statistic) -> Any:
    """A key that equal statistics of a round share."""
    return id(statistic.array), *statistic[1:]


def _round(of_all_leaves: bool, statistics: Iterable[Statistic], splits: Splits) -> Round:
    """A request as it is known when it is traced."""

    def asked(x: Statistic) -> Asked:
        blocks = math.prod(norms.shape_of_blocks(x.array.shape, x.kept))
        split = norms.Split() if x.held == "copies" else splits(() if x.held == "terms" else x.kept)
        return Asked(x.kind, x.kept, x.held, split, max(x.array.size // max(blocks, 1), 1))

    return Round(of_all_leaves, tuple(map(asked, statistics)))


def _abstract_sum(statistic: Statistic, split: norms.Split) -> jax.Array:
    """The sum of a statistic, of which only the type matters: the passes take it otherwise."""
    return norms.over_shards({0: norms.block_sum(term(statistic), statistic.kept)}, {0: split})[0]


def _answer(statistic: Statistic, found: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The answer for the program, from a sum or a mean."""
    root = statistic.kind in ROOTS
    return (norms.from_sum_of_squares(found) if root else found).astype(dtype)


def _cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Floating point arrays in `dtype`; Python numbers, which adapt by themselves, as they are."""

    def cast(x: Any) -> Any:
        if type(x) in (bool, int, float) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(x, dtype)

    return jax.tree.map(cast, tree)
