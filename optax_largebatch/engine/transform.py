"""A gradient transformation written leaf by leaf.

Layer-wise optimizers alternate between work on single elements and norms of whole blocks. A leaf
program says both in one generator: it works on the gradient of one leaf and, where it needs a norm,
yields a request for it and gets the norm back::

    def leaf(update, at):
        param_norm, update_norm = yield block_norms(at.param, update)
        return param_norm / update_norm * update, at.state

The programs of all leaves run in step: each advances to its next request, all requests of that
round are answered together, and so on. The norms of a whole network then take one reduction for
each round, however many leaves it has, and the transforms of a chain share their rounds. A program
that requests nothing is a plain function.

Leaf programs never see dtypes: parameter, gradient and state reach them in the accumulation dtype
of the leaf (float32, or float64), and what they return is cast to the parameter's dtype and, for
the state, to the dtype that the state had.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.arguments import check_state
from optax_largebatch.engine.blocks import of_stacks
from optax_largebatch.engine.declaration import (
    check_declaration,
    checked_request,
    checked_result,
)
from optax_largebatch.engine.recorded_states import FactsOf, record_state
from optax_largebatch.engine.requests import EachMatrix, Leaf, LeafProgram, Request
from optax_largebatch.engine.state import Concat, built_like, names_and_fields
from optax_largebatch.params.leaves import Layout, Leaves, spec_alike
from optax_largebatch.params.stacked import NOT_STACKED, Stacks, check_stacked


@dataclasses.dataclass(frozen=True)
class LeafTransform:
    """A gradient transformation written leaf by leaf.

    Args:
        leaf: the leaf program: takes the gradient and a `Leaf`, returns the update and the leaf's
            new state.
        state: the declaration of the state: the state's NamedTuple with a `Field` in the place of
            each of its arrays.
        scalars: the numbers of a step, from the state: a NamedTuple.
        choices: a hashable choice for each leaf, from the parameters, made when it is traced.
        needs_params: whether `update` must be given the parameters.
        stacked: the parameters that stack layers, from `stacked_layers`; each layer is a block.
            Norms, numbers for each block and vectors of blocks go by it. None, if the user has said
            nothing: `init` then warns of parameters that look like stacks.
        given: the part of the leaf that a leaf program gets. `"whole"`: all of it, on any platform
            and however it is split between devices. `"parts"`: possibly only a part, of any shape;
            the program must work on single elements between its requests, which
            `optax_largebatch.testing.check` checks.
            `"shards"`: the part on its device, possibly a part of each block; the program exchanges
            data with other devices itself.
        facts: what it does with each parameter, for the readers of a run: from the parameters to
            `Facts` of each. None if there is nothing to say.
        name: its name in errors; by default, the name of the function that defines the leaf
            program.
    """

    leaf: Callable[[jax.Array, Leaf], LeafProgram | tuple[jax.Array, Any]]
    state: Any = dataclasses.field(default_factory=optax.EmptyState)
    scalars: Callable[[Any], Any] = lambda state: ()
    choices: Callable[[Leaves], Sequence[Hashable]] = lambda leaves: [()] * len(leaves.arrays)
    needs_params: bool = False
    stacked: Stacks = NOT_STACKED
    given: Literal["whole", "parts", "shards"] = "whole"
    facts: FactsOf | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            names = getattr(self.leaf, "__qualname__", repr(self.leaf)).split(".")
            object.__setattr__(self, "name", names[0])
        check_declaration(self)
        stacks = check_stacked(self.stacked)
        object.__setattr__(self, "stacked", stacks)
        fields = [of_stacks(field, stacks) for field in self.state]
        object.__setattr__(self, "state", built_like(self.state, fields))

    def init(self, params: optax.Params) -> Any:
        """The state before the first step."""
        check_stacked(self.stacked).check_none_forgotten(params)
        state = built_like(self.state, [field.init(params) for field in self.state])
        record_state(state, self, params)
        return state

    def choose(self, leaves: Leaves) -> list["Choice"]:
        """The choice for each leaf, and what else its program has to know of it beforehand."""
        columns = zip(
            self.choices(leaves), check_stacked(self.stacked).axes(leaves.tree), strict=True
        )
        who = f"{self.name} works on whole leaves"
        whole = self.given == "whole"
        return [
            Choice(own, axes, leaves.layout(i, who) if whole else None)
            for i, (own, axes) in enumerate(columns)
        ]

    def check(self, state: Any) -> None:
        """Checks that a state has the fields that are declared."""
        check_state(self.name, self.state, state)
        for field, value in zip(self.state, state, strict=True):
            for transform, own in field.inside(value):
                transform.check(own)

    def split(self, state: Any, leaves: Leaves) -> list[Any]:
        """The state of each leaf."""
        named = zip(names_and_fields(self.state), state, strict=True)
        columns = [field.split(name, value, leaves) for (name, field), value in named]
        return [built_like(self.state, own) for own in zip(*columns, strict=True)] or (
            [self.state] * len(leaves.arrays)
        )

    def kinds(self, part: Any) -> Any:
        """The `ArrayKind` of each array in the state of a leaf."""
        columns = zip(self.state, part, strict=True)
        return built_like(self.state, [field.kinds(own) for field, own in columns])

    def join(self, state: Any, parts: list[Any], leaves: Leaves, concat: Concat) -> Any:
        """The new state, from the old one and the new state of each leaf."""
        new = []
        for position, (name, field) in enumerate(names_and_fields(self.state)):
            own = [part[position] for part in parts]
            new.append(field.join(name, state[position], own, leaves, concat))
        return built_like(self.state, new)

    def same_for_all(self, part: Any, *kinds: type) -> list[tuple[str, str, Any]]:
        """The fields that are the same for all leaves: their transform, name, and value.

        Args:
            part: the state of a leaf.
            *kinds: the kinds of fields that are meant.
        """
        found = []
        for (name, field), value in zip(names_and_fields(self.state), part, strict=True):
            for transform, own in field.inside(value):
                found += transform.same_for_all(own, *kinds)
            if isinstance(field, kinds):
                found.append((self.name, name, value))
        return found

    def program(self, update: jax.Array, at: Leaf) -> LeafProgram:
        """The leaf program of one leaf, begun; whole leaves are put together here."""
        choice, stacked, layout = at.choice
        at = at._replace(choice=choice, stacked=stacked)
        shape, spec = update.shape, norms.explicit_spec(update)
        if layout is None or not any((*layout.mesh_axes, *spec)):
            return (yield from self._started(update, at))

        def gathered(x: Any) -> Any:
            return None if x is None else layout.gathered(x)

        def own_part(x: Any) -> Any:
            if not jnp.ndim(x):
                return x
            part = layout.own_part(x)
            return norms.with_spec(part, spec_alike(spec, shape, part.shape))

        def state_by(move: Callable[[Any], Any], state: Any) -> Any:
            kinds = self.kinds(state)
            return jax.tree.map(lambda x, kind: x if kind == "whole" else move(x), state, kinds)

        here = at._replace(
            param=gathered(at.param),
            start=gathered(at.start),
            state=state_by(gathered, at.state),
        )
        program = self._started(gathered(update), here)
        answer: Any = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                update, state = end.value
                return own_part(update), state_by(own_part, state)
            if isinstance(request, Request):
                copies = (x._replace(held="replicated") for x in request.statistics)
                request = dataclasses.replace(request, statistics=tuple(copies))
            elif isinstance(request, EachMatrix):
                request = request._replace(of_whole=True)
            answer = yield request

    def _started(self, update: jax.Array, at: Leaf) -> LeafProgram:
        """The leaf program as it is written, its operations named after the transform.

        Without the list of what a chain is made of: copied into the name of each operation, it
        makes the text of the compiled program a sixth longer.
        """
        scope = self.name.partition("(")[0]
        with jax.named_scope(scope):
            started = self.leaf(update, at)
        if not isinstance(started, Generator):
            return checked_result(self, started, update, at)
        answer: Any = None
        while True:
            try:
                with jax.named_scope(scope):
                    request = started.send(answer)
            except StopIteration as end:
                return checked_result(self, end.value, update, at)
            request = checked_request(self, request)
            if isinstance(request, Request):
                request = request.of(at)
            answer = yield request


class Choice(NamedTuple):
    """What a leaf program knows of its leaf beforehand."""

    own: Any
    """The choice that the transform has made."""
    stacked: tuple[int, ...]
    layout: Layout | None
    """How the leaf is split, if its program gets all of it."""
