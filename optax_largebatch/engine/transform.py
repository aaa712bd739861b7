"""A gradient transformation written for one array at a time.

Layer-wise optimizers alternate between work on single elements and norms of whole blocks. A leaf
program is a generator that does both: it works on the gradient of one leaf, and yields a request
for each norm that it needs and gets the norm back::

    def leaf(update, at):
        param_norm, update_norm = yield block_norms(at.param, update)
        return param_norm / update_norm * update, at.state

The programs of all leaves run in step: each advances to its next request, all requests of that
round are answered together, and so on. So the norms of a whole network take one reduction for each
round, and the transforms of a chain share their rounds. A program that requests nothing is a plain
function.

Leaf programs never see dtypes. They are given the parameter, the gradient and the state in the
accumulation dtype of the leaf (float32, or float64). The update that they return is cast to the
dtype of the parameter, and the state to the dtype that it had.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.arguments import check_state
from optax_largebatch.engine.declaration import check_declaration, check_result, no_request
from optax_largebatch.engine.recorded_states import FactsOf, record_state
from optax_largebatch.engine.requests import REQUESTS, EachMatrix, Leaf, LeafProgram, Request
from optax_largebatch.engine.state import built_like, names_and_fields
from optax_largebatch.params.leaves import LeafSharding, Leaves, check_real, spec_alike
from optax_largebatch.params.likely_stacks import check_none_forgotten, check_not_flat
from optax_largebatch.params.segments import BlockAxes, Segments
from optax_largebatch.params.stacked import NOT_STACKED, Stacks, check_stacked


@dataclasses.dataclass(frozen=True)
class LeafTransform:
    """A gradient transformation written for one array at a time.

    Args:
        leaf: the leaf program: takes the gradient and a `Leaf`, returns the update and the leaf's
            new state.
        state: the declaration of the state: the state's NamedTuple with a `Field` in the place of
            each of its arrays.
        scalars: the numbers of a step, from the state: a NamedTuple.
        choices: a hashable choice for each leaf, from the parameters, made when it is traced.
        needs_params: whether `update` must be given the parameters.
        stacked: the parameters that stack layers, from `stacked_layers`. Each layer is a block with
            a norm of its own, and with its own entry in vectors of blocks. With None, `init` warns
            of parameters that look like stacks.
        given: what a leaf program gets of its leaf. `"whole"`: all of it, on any platform and mesh.
            `"parts"`: possibly only a part, of any shape; the program must work on single elements
            between its requests, which `optax_largebatch.testing.check` checks. `"shards"`: the
            shard of its device; the program exchanges data with other devices itself.
        takes_complex: whether its leaf program is right for complex arrays: with the squares of
            sizes, the real parts of inner products, and means of squares that are real
            (`PerParameter(is_real=True)`). Any other refuses them.
        facts: what it does with each parameter, for the readers of a run: from the parameters to
            `Facts` of each. None if there is nothing to say.
        at_init: looks at the parameters in `init`, to warn or to raise; None for nothing.
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
    takes_complex: bool = False
    facts: FactsOf | None = None
    at_init: Callable[[optax.Params], None] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            names = getattr(self.leaf, "__qualname__", repr(self.leaf)).split(".")
            object.__setattr__(self, "name", names[0])
        check_declaration(self)
        stacks = check_stacked(self.stacked, segments=self.given != "whole")
        object.__setattr__(self, "stacked", stacks)
        if stacks.texts:  # a tile has a piece of the axis that is cut
            object.__setattr__(self, "given", "shards")
        fields = [field.of_transform(x, stacks) for x, field in names_and_fields(self.state)]
        object.__setattr__(self, "state", built_like(self.state, fields))

    def init(self, params: optax.Params) -> Any:
        """The state before the first step."""
        stacks = check_stacked(self.stacked)
        check_none_forgotten(stacks, params)
        if self.at_init is not None:
            self.at_init(params)
        check_not_flat(stacks, params)
        state = built_like(self.state, [field.init(params) for field in self.state])
        record_state(state, self, params)
        return state

    def choose(self, leaves: Leaves) -> list["StaticLeaf"]:
        """The choice for each leaf, and what else its program has to know of it beforehand."""
        if not self.takes_complex:
            check_real(self.name, leaves)
        choices = self.choices(leaves)
        blocks = check_stacked(self.stacked).over_blocks(leaves)
        shardings: list[LeafSharding | None] = [None] * len(leaves.arrays)
        if self.given == "whole":
            shardings[:] = leaves.shardings(f"{self.name} works on whole leaves")
        return [StaticLeaf(*x) for x in zip(choices, blocks, shardings, strict=True)]

    def check(self, state: Any) -> None:
        """Checks that a state has the fields that are declared."""
        check_state(self.name, self.state, state)
        for field, value in zip(self.state, state, strict=True):
            for transform, inner_state in field.inside(value):
                transform.check(inner_state)

    def split(self, state: Any, leaves: Leaves) -> list[Any]:
        """The state of each leaf."""
        if not self.state:
            return [self.state] * len(leaves.arrays)
        fields = zip(self.state, state, strict=True)
        of_fields = [field.split(value, leaves) for field, value in fields]
        return [built_like(self.state, values) for values in zip(*of_fields, strict=True)]

    def kinds(self, leaf_state: Any) -> Any:
        """The `ArrayKind` of each array in the state of a leaf."""
        fields = zip(self.state, leaf_state, strict=True)
        return built_like(self.state, [field.kinds(value) for field, value in fields])

    def join(self, state: Any, leaf_states: list[Any], leaves: Leaves) -> Any:
        """The new state, from the old one and the new state of each leaf."""
        new = []
        for k, (field, old) in enumerate(zip(self.state, state, strict=True)):
            of_leaves = [leaf_state[k] for leaf_state in leaf_states]
            new.append(field.join(old, of_leaves, leaves))
        return built_like(self.state, new)

    def program(self, update: jax.Array, at: Leaf) -> LeafProgram:
        """The leaf program of one leaf, begun; whole leaves are put together here.

        Args:
            update: the gradient, or the update of the transform before.
            at: what the program is given with it; as its choice, the `StaticLeaf`.
        """
        leaf: StaticLeaf = at.choice
        at = at._replace(choice=leaf.choice, stacked=leaf.blocks.axes)
        sharding = leaf.sharding
        if sharding is None or not any((*sharding.mesh_axes, *norms.explicit_spec(update))):
            return self._named(update, at, leaf.blocks.segments)
        return self._on_whole_leaf(update, at, sharding)

    def _on_whole_leaf(
        self,
        update: jax.Array,
        at: Leaf,
        sharding: LeafSharding,
    ) -> LeafProgram:
        """The leaf program of a split leaf; each device gathers all of it and keeps its shard."""
        shape = update.shape
        spec = norms.explicit_spec(update)

        def shard(x: Any) -> Any:
            if not jnp.ndim(x):
                return x
            of_device = sharding.local_shard(x)
            return norms.with_spec(of_device, spec_alike(spec, shape, of_device.shape))

        def moved(move: Callable[[Any], Any], state: Any) -> Any:
            kinds = self.kinds(state)
            return jax.tree.map(lambda x, kind: x if kind == "whole" else move(x), state, kinds)

        update, param, start = jax.tree.map(sharding.gathered, (update, at.param, at.start))
        state = moved(sharding.gathered, at.state)
        whole = at._replace(param=param, start=start, state=state)
        update, state = yield from self._named(update, whole, None, _on_copies)
        return shard(update), moved(shard, state)

    def _named(
        self,
        update: jax.Array,
        at: Leaf,
        segments: Segments | None,
        adapted: Callable[[Any], Any] | None = None,
    ) -> Generator[Any, Any, Any]:
        """The leaf program as it is written, its operations named after the transform.

        The name is without the parts of a chain: copied into the name of each operation, they make
        the text of the compiled program a sixth longer.
        """
        scope = self.name.partition("(")[0]
        with jax.named_scope(scope):
            result: Any = self.leaf(update, at)
        answer = None
        while isinstance(result, Generator):
            try:
                with jax.named_scope(scope):
                    request = result.send(answer)
            except StopIteration as end:
                result = end.value
                continue
            if not isinstance(request, REQUESTS):
                raise no_request(self, request)
            asked = request if isinstance(request, Request) and request.path is None else None
            if asked:
                request = asked.of(at, segments)
            if adapted:
                request = adapted(request)
            answer = yield request
            if asked and segments:
                answer = list(map(segments.answer, asked.statistics, answer))
        if at.run.is_first:
            check_result(self, result, update, at)
        return result


def _on_copies(request: Any) -> Any:
    """The request of a leaf program that has a whole leaf on every device."""
    if isinstance(request, Request):
        copies = [x._replace(held="replicated") for x in request.statistics]
        return dataclasses.replace(request, statistics=tuple(copies))
    if isinstance(request, EachMatrix):
        on = request.on._replace(matrices=request.on.matrices.whole)
        return request._replace(on=on)
    return request


class StaticLeaf(NamedTuple):
    """What is known of a leaf before a step is traced; hashable."""

    choice: Any
    """The choice that the transform has made."""
    blocks: BlockAxes
    """The axes that run over its blocks."""
    sharding: LeafSharding | None
    """How the leaf is split, if its program gets all of it."""
