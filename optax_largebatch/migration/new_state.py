"""The state of a new optimizer, with what an old one has for it."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.engine.blocks import VectorOfBlocks
from optax_largebatch.engine.recorded_states import RecordedState, recorded_states
from optax_largebatch.engine.state import names_and_fields
from optax_largebatch.migration.conversion import block_ids
from optax_largebatch.migration.moments import COPIES, STEPS, Kept, counters, kind_of
from optax_largebatch.optimizers.lbsgd import ScaleByWarmedUpRateState
from optax_largebatch.params.owners import (
    Keys,
    StateNode,
    by_parameter,
    keyed_arrays,
    nodes_of,
    seen_by,
)
from optax_largebatch.params.stacked import Stacked, check_stacked
from optax_largebatch.transforms.noise.noise_scale import MeasureNoiseScaleState
from optax_largebatch.transforms.orthogonalization.neurons import NormalizeNeuronsState
from optax_largebatch.wrappers.bad_steps import SkipBadStepsState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState
from optax_largebatch.wrappers.master_weights import MasterWeightsState
from optax_largebatch.wrappers.weight_average import AverageWeightsState

_OTHERS = (optax.MultiStepsState, optax.schedules.InjectStatefulHyperparamsState)
"""States of optax that begin anew, but for the number of steps."""
_BEGIN_ANEW = (DynamicLossScaleState, MeasureNoiseScaleState, SkipBadStepsState)
"""States of this library whose numbers never go over."""
_GO_OVER = (AverageWeightsState, NormalizeNeuronsState)
"""States whose numbers go over, if the new optimizer has such a state."""
_OF_LAST_STEP = {"learning_rates", "trust_ratios"}
"""Fields of states that count steps and tell of the last one."""


class NewState(NamedTuple):
    """Puts the nodes of an old state into the places of a new one."""

    old: Kept
    new: Kept
    """The new optimizer's state before the first step."""
    steps: int
    """The number of steps so far."""
    made: dict[Keys, RecordedState]
    """How the nodes of the new state were made, as far as the optimizer says so."""
    old_made: dict[Keys, RecordedState]
    """The same of the old state."""

    def of(self, node: Any, keys: Keys = ()) -> Any:
        """A node of the state before the first step, with what the old state has for it.

        Args:
            node: the node.
            keys: the keys on the way to it.
        """
        state_node = next((x for x in self.new.nodes if x.keys == keys), None)
        if state_node is None:  # an array, or a part of a copy of the parameters
            return node
        if hasattr(node, "_fields"):
            return node._replace(**self._changed(state_node))
        structure = jax.tree.structure(node, is_leaf=lambda x: x is not node)
        below = state_node.fields.items()
        return structure.unflatten(self.of(child, (*keys, key)) for key, child in below)

    def _changed(self, node: StateNode) -> dict[str, Any]:
        """The fields of a NamedTuple that change."""
        fields = node.fields
        if kind_of(node):
            return self._moments(fields)
        if self._has_numbers_of_its_own(node):
            return self._own_numbers(node)
        new = {
            name: self.of(child, (*node.keys, name))
            for name, child in fields.items()
            if name not in COPIES
        }
        new |= self._vectors(node)
        if issubclass(node.kind, MasterWeightsState):
            new["master"] = self._like_params(node, "master", self.old.before.params)
        if issubclass(node.kind, NormalizeNeuronsState):
            new["nu"] = self._neurons(node)
        # `step` is of optax.conditionally_transform, `steps` of average_weights and others of ours.
        counted = counters(node, (*STEPS, "step", "steps"))
        counts: dict[str, Any] = dict.fromkeys(counted, self.steps)
        for old_node in self._same(node)[:1]:
            if "average" in fields:
                new["average"] = self._like_params(node, "average")
                counts["weight"] = old_node.array("weight")
            if "steps" in fields:
                counts["steps"] = old_node.array("steps")
        return new | {name: placed(count, fields[name]) for name, count in counts.items()}

    def _moments(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a state of Adam or Muon, or of a momentum buffer."""
        new = {}
        sources = {}
        for name in fields.keys() & set(COPIES):
            arrays = self.old.numbered(fields[name])
            for number, like in arrays.items():
                if moment := self.old.moments[number]:  # without one it begins anew: it was checked
                    sources[moment.node.keys] = moment.node
                    arrays[number] = self._put(moment.arrays.get(name, moment.first), like)
            new[name] = jax.tree.structure(fields[name]).unflatten(arrays.values())
        if "count" not in fields:
            return new
        # Adam corrects its moments by the number of gradients in them.
        counts = [counters(x, ("count",)).get("count", self.steps) for x in sources.values()]
        numbers = known(counts or [0 if self.old.forgotten else self.steps])
        if len(numbers) > 1:
            raise ValueError(
                "state must have counted as many steps for all parameters that one part of "
                f"optimizer moves, and has counted {numbers}: their bias corrections differ. Begin "
                "with optimizer.init(params)."
            )
        return new | {"count": placed(numbers[0], fields["count"])}

    def _has_numbers_of_its_own(self, node: StateNode) -> bool:
        """Whether a node collects numbers that most optimizers do not have."""
        if issubclass(node.kind, _OTHERS) or node.fields.keys() & _OF_LAST_STEP:
            return False
        return (
            (not _is_ours(node) and any(map(self.old.like_params, node.fields.values())))
            or ("count" in node.fields and len(node.fields) > 1)
            or issubclass(node.kind, ScaleByWarmedUpRateState)
        )

    def _own_numbers(self, node: StateNode) -> dict[str, Any]:
        """The fields of a node that collects numbers of its own, from the same node of old."""
        same = self._same(node)
        if len(same) != 1 or not _is_ours(node) or self.old.conversion:
            raise ValueError(
                f"optimizer has a {node.kind.__name__}, whose numbers no other optimizer keeps, "
                "and no convert moves. Begin with optimizer.init(params)."
            )
        values, likes = (dict(keyed_arrays(x.fields)) for x in (same[0], node))
        shapes, needed = (jax.tree.map(jnp.shape, x) for x in (values, likes))
        if shapes != needed:
            raise ValueError(
                f"the {node.kind.__name__} in state has the shapes {[*shapes.values()]}, and "
                f"optimizer needs {[*needed.values()]}. Pass the parameters that the old optimizer "
                "moved, and give optimizer the same `stacked`."
            )
        return jax.tree.structure(node.fields).unflatten(
            (self._put if x.ndim else placed)(values[keys], x) for keys, x in likes.items()
        )

    def _same(self, node: StateNode) -> list[StateNode]:
        """The node of the old state of the same kind in the same place, or all of that kind."""
        old = [x for x in self.old.nodes if x.is_one(node.kind)]
        return [x for x in old if x.keys == node.keys] or old

    def _put(self, value: Any, like: Any) -> jax.Array:
        """A value with the dtype of another array. It stays where it is, unless it was converted.

        The second moments of complex parameters are complex in optax, and their imaginary parts
        are 0.
        """
        if jnp.iscomplexobj(value) and not jnp.iscomplexobj(like):
            value = value.real
        if isinstance(value, jax.Array) and not self.old.conversion:
            return jnp.asarray(value, jnp.result_type(like))
        return placed(value, like)

    def _like_params(
        self,
        node: StateNode,
        field: str,
        others: Any = None,
    ) -> Any:
        """A field like the parameters, from the same node of the old state.

        Args:
            node: the new node.
            field: the field.
            others: a tree with what stands for old parameters of which the state has no such array.
        """
        values = self.old.before.like_params(others)
        for old_node in self._same(node):
            values |= self.old.before.like_params(old_node.fields[field])
        likes = self.old.numbered(node.fields[field])
        carried = self.old.carried(values, likes)
        if likes.keys() - carried.keys() - self.old.forgotten:
            raise ValueError(
                f"state must hold an {field} of all parameters of which optimizer keeps one, and "
                "has one of others. Put the wrapper around the same parameters as before, or begin "
                "with optimizer.init(params)."
            )
        return jax.tree.structure(node.fields[field]).unflatten(
            # An array of bytes stands for a parameter that is its own master.
            self._put(carried.get(k, like), like)
            if jnp.issubdtype(jnp.result_type(like), jnp.inexact)
            else like
            for k, like in likes.items()
        )

    def _neurons(self, node: StateNode) -> Any:
        """The second moments of neurons, 0 for parameters that had none."""
        before = self.old.before
        values = {}
        for old_node in self._same(node):
            values |= _neurons_by_owner(old_node, before)
        if self.old.conversion:
            values = {k: jnp.broadcast_to(x, before.shapes[k]) for k, x in values.items()}
        carried = self.old.carried(values)
        taken = []
        for number, like in _neurons_by_owner(node, self.new).items():
            whole = carried.get(number, like)
            value = whole[tuple(map(slice, like.shape))]
            is_whole = whole.shape == value.shape or np.all(whole == value)
            if value.shape != like.shape or not is_whole:
                name = self.old.names[number]
                raise ValueError(
                    f"the neurons of {name!r} must be those of before, because normalize_neurons "
                    "keeps a second moment of each: give it the same side, and let convert leave "
                    f"them whole. Or begin it anew: forget=matching({name!r})."
                )
            taken.append(placed(value, like))
        return jax.tree.structure(node.fields["nu"]).unflatten(taken)

    def _vectors(self, node: StateNode) -> dict[str, jax.Array]:
        """The vectors of blocks of a node, as at first for blocks that the old state had not."""
        made = self.made.get(node.keys)
        if made is None:  # by an `init` inside `jax.jit`, which does not say of which blocks it is
            return {}
        new = {}
        for name, field in names_and_fields(made.transform.state):
            if not isinstance(field, VectorOfBlocks):
                continue
            stacked = check_stacked(field.stacked)
            sizes = stacked.sizes(made.params)
            split = np.split(jax.device_get(node.array(name)), np.cumsum(sizes)[:-1])
            at_first = dict(zip(self.old.numbered(made.params), split, strict=True))
            old, old_ids = self._old_vector(node, name, stacked)
            if self.old.conversion:
                ids = dict(zip(at_first, block_ids(stacked, made.params), strict=True))
                old = self.old.conversion.of_blocks(old, old_ids, at_first, ids, name == "radii")
            kept = {
                number: old[number]
                for number in old.keys() & at_first.keys() - self.old.forgotten
                if old[number].size == at_first[number].size
            }
            new[name] = placed(np.concatenate([*(at_first | kept).values()]), node.array(name))
        return new

    def _old_vector(
        self,
        node: StateNode,
        name: str,
        stacked: Stacked,
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """The numbers of the blocks of each parameter in the old state, and the `block_ids`.

        Args:
            node: the new node.
            name: the vector.
            stacked: the stacks of the new optimizer, if the old one does not say what it had.
        """
        vectors: dict[int, Any] = {}
        ids: dict[int, Any] = {}
        before = self.old.before
        same = self._same(node)
        # Of several nodes each has the radii of other parameters, but all have other ratios.
        for old_node in same if name == "radii" else same[: len(same) == 1]:
            made = self.old_made.get(old_node.keys)
            if self.old.conversion and made is None:
                raise ValueError(
                    "old_optimizer must be given with convert: state has a "
                    f"{node.kind.__name__}, and does not say of which blocks its {name} are."
                )
            of_old = getattr(made.transform.state, name).stacked if made else stacked
            with contextlib.suppress(ValueError):  # the stacks were others, and so the blocks
                entries = by_parameter([old_node], name, before.state, before.params, of_old)
                # On the host: XLA would compile what is done to each of hundreds of small arrays.
                vector = jax.device_get(placed(old_node.array(name), node.array(name)))
                vectors |= {x.number: vector[x.entries] for x in entries}
                ids |= enumerate(block_ids(of_old, before.params)) if made else {}
        return vectors, ids


def _neurons_by_owner(node: StateNode, kept: Kept) -> dict[int, Any]:
    """The second moments of neurons, by the numbers of the parameters."""
    arrays = sorted(keyed_arrays(node.fields["nu"]), key=lambda keyed: int(keyed[0][0]))
    owners = seen_by(node, kept.state, kept.params) or range(len(arrays))
    return {owner: array for owner, (_, array) in zip(owners, arrays, strict=True)}


def left_out(old: Kept, new: Kept) -> list[str]:
    """The names of the states whose numbers do not go over."""
    gone = [kind for kind in _GO_OVER if not new.has(kind)]
    return [kind.__name__ for kind in (*_BEGIN_ANEW, *gone) if old.has(kind)]


def made_parts(
    optimizer: Any,
    params: Any,
) -> tuple[Any, dict[Keys, RecordedState]]:
    """The first state of an optimizer, and by their keys how its nodes were made."""
    with recorded_states() as record:
        state = optimizer.init(params)
    made = {tuple(map(id, recorded.state)): recorded for recorded in record}
    return state, {
        node.keys: made[ids]
        for node in nodes_of(state)
        if (ids := tuple(map(id, node.fields.values()))) in made
    }


def _is_ours(node: StateNode) -> bool:
    return node.kind.__module__.startswith("optax_largebatch.")


def known(tree: Any) -> list[int]:
    """The numbers of a tree in order, each once."""
    return sorted(set(map(int, jax.device_get(jax.tree.leaves(tree)))))


def placed(value: Any, like: Any) -> jax.Array:
    """A value with the dtype of another array, and on its devices, if it is bound to these.

    What `init` of optax makes of no parameter, such as a count, is bound to no device. If it were
    bound to the first one, `jax.jit` would refuse it together with parameters on several.
    """
    dtype = jnp.result_type(like)
    if getattr(like, "committed", False):
        return jnp.asarray(jax.device_put(value, like.sharding), dtype)
    if getattr(value, "committed", True):
        value = np.asarray(jax.device_get(value), dtype)
    return jnp.asarray(jax.device_put(value), dtype)
