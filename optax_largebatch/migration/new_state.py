"""The state of a new optimizer, with what an old one has for it."""

from collections.abc import Iterable
import contextlib
import dataclasses
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.engine.recorded_states import RecordedState
from optax_largebatch.migration.moments import COPIES, STEPS, Kept, counters, kind_of
from optax_largebatch.optimizers.lbsgd import ScaleByWarmedUpRateState
from optax_largebatch.params.owners import (
    Keys,
    Part,
    by_parameter,
    keyed_arrays,
    parts_of,
    seen_by,
)
from optax_largebatch.params.stacked import Stacked, check_stacked
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.nesterov import NesterovSplitState
from optax_largebatch.transforms.orthogonalization.neurons import NormalizeNeuronsState
from optax_largebatch.transforms.trust_ratio import ScaleByLarsState
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState
from optax_largebatch.wrappers.master_weights import MasterWeightsState
from optax_largebatch.wrappers.stochastic_rounding import StochasticRoundingState
from optax_largebatch.wrappers.weight_average import AverageWeightsState

_BEGIN_ANEW = (
    AccumulateGradientsState,
    HyperballState,
    ScaleByLarsState,
    ScaleByLearningRateState,
    optax.MultiStepsState,
    optax.schedules.InjectStatefulHyperparamsState,
)
"""States of several fields that begin anew, but for the number of steps."""
_NEVER_TAKEN_OVER = (NesterovSplitState, ScaleByWarmedUpRateState)
"""States that hold other states, and numbers that only their own optimizer collects."""


@dataclasses.dataclass(frozen=True)
class NewState:
    """Puts the parts of an old state into the places of a new one."""

    old: Kept
    steps: int
    """The number of steps so far."""
    made: list[RecordedState]
    """How the parts of the new state were made."""

    def of(self, node: Any) -> Any:
        """A node of the state before the first step, with what the old state has for it."""
        if isinstance(node, dict):
            return type(node)((key, self.of(child)) for key, child in node.items())
        if not isinstance(node, tuple | list):
            return node
        part = next(parts_of(node), None)
        if part is None:  # it is empty
            return node
        if not hasattr(node, "_fields"):
            return type(node)(map(self.of, node))
        named: Any = node
        return named._replace(**self._changed(part, named._asdict()))

    def _changed(self, part: Part, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a NamedTuple that change."""
        if kind_of(part):
            return self._moments(fields)
        if self._has_numbers_of_its_own(part):
            return self._own_numbers(part, fields)
        new = {name: self.of(child) for name, child in fields.items() if name not in COPIES}
        if issubclass(part.kind, HyperballState):
            new["radii"] = self._radii(fields["radii"])
        if issubclass(part.kind, MasterWeightsState):
            new["master"] = self._masters(part, fields["master"])
        if issubclass(part.kind, NormalizeNeuronsState):
            new["nu"] = self._neurons(fields["nu"])
        if issubclass(part.kind, StochasticRoundingState):
            steps = next((old.array("steps") for old in self._same(part)), self.steps)
            new["steps"] = placed(steps, fields["steps"])
        if issubclass(part.kind, AverageWeightsState):
            new |= self._average(part, fields)
        counted = counters(part, (*STEPS, "step"))  # `step` of optax.conditionally_transform
        return new | {name: placed(self.steps, like) for name, like in counted.items()}

    def _moments(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a state of Adam or Muon, or of a momentum buffer."""
        new, sources = {}, {}
        for name in fields.keys() & set(COPIES):
            tree, taken = fields[name], []
            for keys, like in keyed_arrays(tree):
                moment: Any = self.old.moments[self.old.numbers[keys]]  # is there: it was checked
                sources[moment.part.keys] = moment.part
                taken.append(cast(moment.arrays.get(name, moment.first), like))
            new[name] = jax.tree.unflatten(jax.tree.structure(tree), taken)
        if "count" not in fields:
            return new
        # Adam corrects its moments by the number of gradients in them.
        counts = [counters(x, ("count",)).get("count", self.steps) for x in sources.values()]
        numbers = known(counts)
        if numbers and len(numbers) > 1:
            raise ValueError(
                "state must have counted as many steps for all parameters that one part of "
                f"optimizer moves, and has counted {numbers}: their bias corrections differ. Begin "
                "with optimizer.init(params)."
            )
        found = counts[0] if numbers is None else (numbers or [self.steps])[0]
        return new | {"count": placed(found, fields["count"])}

    def _has_numbers_of_its_own(self, part: Part) -> bool:
        """Whether a part collects numbers that most optimizers do not have."""
        if issubclass(part.kind, _BEGIN_ANEW):
            return False
        beside_others = "count" in part.fields and len(part.fields) > 1
        foreign_moments = not _is_ours(part) and any(
            map(self._is_like_params, part.fields.values())
        )
        return beside_others or foreign_moments or issubclass(part.kind, _NEVER_TAKEN_OVER)

    def _is_like_params(self, tree: Any) -> bool:
        """Whether a tree has arrays of the shapes and the kind of numbers of parameters."""
        leaves, found = jax.tree.leaves(self.old.params), keyed_arrays(tree)
        return bool(found) and all(
            keys in self.old.numbers
            and jnp.shape(array) == jnp.shape(leaves[self.old.numbers[keys]])
            and jnp.issubdtype(jnp.result_type(array), jnp.inexact)
            for keys, array in found
        )

    def _own_numbers(self, part: Part, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a part that collects numbers of its own, from the same part of old."""
        same = self._same(part)
        if len(same) != 1 or not _is_ours(part) or issubclass(part.kind, _NEVER_TAKEN_OVER):
            raise ValueError(
                f"optimizer has a {part.kind.__name__}, whose numbers no other optimizer keeps. "
                "Begin with optimizer.init(params)."
            )
        return {
            name: self._laid_out(name, same[0].fields[name], new) for name, new in fields.items()
        }

    def _same(self, part: Part) -> list[Part]:
        """The parts of the old state of the same kind."""
        return [one for one in self.old.parts if one.is_one(part.kind)]

    def _masters(self, part: Part, new: Any) -> Any:
        """The masters of the old state, where both have one: an array of bytes stands for none."""
        old = {k: x for one in self._same(part) for k, x in keyed_arrays(one.fields["master"])}
        pairs = [(old.get(keys, like), like) for keys, like in keyed_arrays(new)]
        taken = [x if (x.shape, x.dtype) == (like.shape, like.dtype) else like for x, like in pairs]
        return jax.tree.unflatten(jax.tree.structure(new), map(cast, taken, jax.tree.leaves(new)))

    def _average(self, part: Part, fields: dict[str, Any]) -> dict[str, Any]:
        """The average of the old state with its numbers; if it has none, the number of steps."""
        same, new = self._same(part), keyed_arrays(fields["average"])
        for old in same:
            arrays = dict(keyed_arrays(old.fields["average"]))
            if all(keys in arrays and jnp.shape(arrays[keys]) == like.shape for keys, like in new):
                taken = [cast(arrays[keys], like) for keys, like in new]
                structure = jax.tree.structure(fields["average"])
                return {
                    "average": structure.unflatten(taken),
                    "steps": placed(old.array("steps"), fields["steps"]),
                    "weight": placed(old.array("weight"), fields["weight"]),
                }
        if same:
            raise ValueError(
                "state must hold an average of all parameters of which optimizer keeps one, and "
                "has one of others. Put average_weights around the same parameters as before, or "
                "begin with optimizer.init(params)."
            )
        return {"steps": placed(self.steps, fields["steps"])}

    def _neurons(self, new: Any) -> Any:
        """The second moments of neurons, 0 for parameters that had none of this shape."""
        arrays, structure = jax.tree.flatten(new)
        made = [x for x in self.made if getattr(x.state, "nu", None) is new]
        # An `init` inside `jax.jit` does not say which parameters it was given: maybe all.
        keys = [keys for keys, _ in keyed_arrays(made[0].params if made else self.old.params)]
        if len(keys) != len(arrays):
            return new
        old = self._old_neurons()
        pairs = [(old.get(self.old.numbers[at], x), x) for at, x in zip(keys, arrays, strict=True)]
        taken = [placed(x if jnp.shape(x) == like.shape else like, like) for x, like in pairs]
        return structure.unflatten(taken)

    def _old_neurons(self) -> dict[int, Any]:
        """The second moments of the neurons of each parameter in the old state."""
        moments: dict[int, Any] = {}
        for neurons in self.old.parts:
            if not neurons.is_one(NormalizeNeuronsState):
                continue
            arrays = dict(keyed_arrays(neurons.fields["nu"]))
            seen = list(range(len(self.old.names)))
            if len(arrays) < len(seen):
                seen = seen_by(neurons, self.old.state, self.old.params)
            places = [(str(place), "0") for place in range(len(seen))]
            if arrays.keys() == set(places):
                moments |= {k: arrays[place] for k, place in zip(seen, places, strict=True)}
        return moments

    def _laid_out(self, name: str, old: Any, new: Any) -> Any:
        """A field of an old state in the layout of the new one.

        Version 0.1.0 had trees like the parameters in the place of vectors and of tuples with an
        entry for each parameter.
        """
        wanted, structure = jax.tree.flatten(new)
        arrays = dict(keyed_arrays(old))
        keys = [keys for keys, _ in keyed_arrays(new)]
        same_layout = arrays.keys() == set(keys)
        found = [arrays[key] for key in (keys if same_layout else sorted(arrays, key=self._number))]
        if not same_layout and len(wanted) == 1:
            found = [joined(fetched(found, wanted[0]), wanted[0])]
        if list(map(jnp.shape, found)) != list(map(jnp.shape, wanted)):
            raise ValueError(
                f"the {name} in state has the shapes {list(map(jnp.shape, found))}, and optimizer "
                f"needs {list(map(jnp.shape, wanted))}. Pass the parameters that the old optimizer "
                "moved, and give optimizer the same `stacked`."
            )
        put = cast if self._is_like_params(new) else placed
        return structure.unflatten(map(put, found, wanted))

    def _number(self, keys: Keys) -> int:
        """The number of the parameter whose keys come first in these."""
        heads = (keys[:end] for end in range(len(keys) + 1))
        return next((self.old.numbers[head] for head in heads if head in self.old.numbers), -1)

    def _radii(self, new: jax.Array) -> jax.Array:
        """The radii of a `HyperballState`, 0 for blocks that had none: their next step takes it."""
        made = [x for x in self.made if getattr(x.state, "radii", None) is new]
        if not made:  # by an `init` inside `jax.jit`, which does not say of which blocks they are
            return new
        stacked, params = check_stacked(made[0].transform.stacked), made[0].params
        old, found = self._old_radii(stacked, new), []
        for (keys, _), size in zip(keyed_arrays(params), stacked.sizes(params), strict=True):
            none = np.zeros(size, new.dtype)
            radii = old.get(self.old.numbers[keys], none)
            found.append(radii if radii.size == size else none)
        return joined(found, new)

    def _old_radii(self, stacked: Stacked, like: jax.Array) -> dict[int, Any]:
        """The radii of each parameter in the old state, on the host.

        Args:
            stacked: the stacks of the new optimizer, for radii that are one vector.
            like: an array on the devices of the new ones.
        """
        found: dict[int, Any] = {}
        for part in self.old.parts:
            if not part.is_one(HyperballState):
                continue
            trees = fetched(dict(keyed_arrays(part.fields["radii"])), like)
            if trees.keys() <= self.old.numbers.keys():  # of version 0.1.0: like the parameters
                found |= {self.old.numbers[keys]: radii for keys, radii in trees.items()}
                continue
            (vector,) = trees.values()
            with contextlib.suppress(ValueError):  # the stacks were others, and so the blocks
                entries = by_parameter([part], "radii", self.old.state, self.old.params, stacked)
                found |= {one.number: vector[one.entries] for one in entries}
        return found


def _is_ours(part: Part) -> bool:
    return part.kind.__module__.startswith("optax_largebatch.")


def are_traced(*tree: Any) -> bool:
    """Whether some arrays are not known yet, as inside `jax.jit` and `jax.vmap`."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def known(tree: Any) -> list[int] | None:
    """The numbers of a tree in order, each once; None if they are traced."""
    return (
        None if are_traced(tree) else sorted(set(map(int, jax.device_get(jax.tree.leaves(tree)))))
    )


def placed(value: Any, like: Any) -> jax.Array:
    """A value with the dtype of another array, and on its devices."""
    dtype = jnp.result_type(like)
    if are_traced(value, like):
        return jnp.asarray(value, dtype)
    if not isinstance(value, jax.Array):
        value = np.asarray(value, dtype)
    return jnp.asarray(jax.device_put(value, getattr(like, "sharding", None)), dtype)


def cast(value: Any, like: Any) -> jax.Array:
    """A value with the dtype of another array. It stays where it is, if it is on a device.

    The second moments of complex parameters are complex in optax, and their imaginary parts are 0.
    """
    if jnp.iscomplexobj(value) and not jnp.iscomplexobj(like):
        value = value.real
    if isinstance(value, jax.Array):
        return jnp.asarray(value, jnp.result_type(like))
    return placed(value, like)


def fetched(tree: Any, like: jax.Array) -> Any:
    """The arrays of a tree on the host, unless they are traced.

    XLA would compile what is done to each of hundreds of small arrays, which takes minutes.

    Args:
        tree: the arrays, which may be split between devices.
        like: an array that every device has whole.
    """
    return tree if are_traced(tree, like) else jax.device_get(jax.device_put(tree, like.sharding))


def joined(arrays: Iterable[Any], like: jax.Array) -> jax.Array:
    """One vector of all elements of fetched arrays, with the dtype and the devices of another."""
    flat = [x.reshape(-1) for x in arrays]
    numpy: Any = jnp if are_traced(flat) else np
    return placed(numpy.concatenate(flat), like) if flat else like
