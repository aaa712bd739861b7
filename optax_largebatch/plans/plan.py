"""The plan of a run as plain data, which answers for each step."""

import bisect
import dataclasses
import json
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.arguments import check_choice
from optax_largebatch.plans.counts import Count, count, integer
from optax_largebatch.plans.coupling import DECAY_KINDS, POWERS, Coupling, DecayKind
from optax_largebatch.plans.planned_rate import PlannedRate, planned
from optax_largebatch.plans.stages import Stage, stages_of, starts_of
from optax_largebatch.plans.table import table

LARGEST_INT32 = 2**31 - 1
"""Steps and batch sizes are int32; numbers of examples, which grow faster, are floats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The result of `batch_plan`: print it for a table, `plots.batch_plan` draws it.

    It is plain data. Plans compare, hash and can be pickled, and `to_json` writes one into a
    configuration. Its methods take a step as a Python integer or as an array, traced or not, so
    they are schedules:

    ```python
    optimizer = optax.adamw(plan.learning_rate)
    optimizer = accumulate_gradients(optimizer, every=plan.micro_batches)
    ```

    Steps past the end have the values that the run ends with.
    """

    stages: tuple[Stage, ...]
    """The stages, each with its first step, the examples before that step, and its batch size."""
    total_steps: int
    """The steps of the run. The last one completes the examples that were asked for."""
    examples: int
    """The examples that were asked for; the last batch may end a little later."""
    sequence_length: int | None
    """The tokens of an example, if the plan counts tokens."""
    rate: Any
    """The learning rate for `reference_batch_size`: a number, a schedule, or None."""
    decay: Any
    """The weight decay for `reference_batch_size`: a number, a schedule, or None."""
    coupling: Coupling
    """The power of the batch size that the learning rate follows."""
    decay_kind: DecayKind
    """The kind of the weight decay: a decoupled one keeps its timescale, others their value."""
    reference_batch_size: int
    """The batch size that `rate` and `decay` are for."""
    micro_batch_size: int | None
    """The examples of a micro-batch on each device, if gradients are accumulated."""
    devices: int
    """The devices that share a batch."""
    note: str
    """Where the stages come from, in words."""

    def __post_init__(self) -> None:
        check_choice("coupling", self.coupling, tuple(POWERS))
        check_choice("decay_kind", self.decay_kind, DECAY_KINDS)
        if not isinstance(self.note, str):
            raise TypeError(f"note must be a string, got {self.note!r}.")
        # Also what a text of JSON says, and `dataclasses.replace`, become integers of Python here.
        names = ["examples", "reference_batch_size", "devices"]
        optional = ("sequence_length", "micro_batch_size")
        names += [name for name in optional if getattr(self, name) is not None]
        checked: dict[str, Any] = {
            name: count(name, getattr(self, name), at_least=1) for name in names
        }
        examples = checked["examples"]
        starts = starts_of([(stage.first_example, stage.batch_size) for stage in self.stages])
        stages, total_steps = stages_of(starts, examples)
        if (stages, total_steps) != (self.stages, self.total_steps):
            raise ValueError(
                f"stages and total_steps must be those of a run of {examples} examples, {stages} "
                f"and {total_steps}; got {self.stages} and {self.total_steps}. Let batch_plan(...) "
                "make the plan."
            )
        checked |= {"stages": stages, "total_steps": total_steps}
        length = examples * checked.get("sequence_length", 1)
        checked |= {name: planned(name, getattr(self, name), length) for name in ("rate", "decay")}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

        own = (self.micro_batch_size or 1) * self.devices
        for stage in self.stages:
            if stage.batch_size > LARGEST_INT32:
                raise ValueError(
                    f"stages must have batch sizes of at most {LARGEST_INT32}, since arrays of "
                    f"them are int32, got {stage.batch_size}. If you count tokens, give batch "
                    "sizes in examples, and sequence_length."
                )
            if stage.batch_size % own:
                lower = stage.batch_size // own * own
                raise ValueError(
                    "stages must have batch sizes that are multiples of micro_batch_size x devices "
                    f"= {self.micro_batch_size or 1} x {self.devices} = {own}, got "
                    f"{stage.batch_size}. Take {f'{lower} or ' if lower else ''}{lower + own}, or "
                    "another micro-batch."
                )
        if self.total_steps > LARGEST_INT32:
            raise ValueError(
                f"the run has {self.total_steps} steps, more than the {LARGEST_INT32} that the "
                "counter of an optimizer holds. Take larger batches, or a smaller total."
            )

    @overload
    def batch_size(self, step: int) -> int: ...
    @overload
    def batch_size(self, step: jax.typing.ArrayLike) -> Any: ...
    def batch_size(self, step: Any) -> Any:
        """The examples in a step."""
        return self._at(step, [stage.batch_size for stage in self.stages])

    @overload
    def micro_batches(self, step: int) -> int: ...
    @overload
    def micro_batches(self, step: jax.typing.ArrayLike) -> Any: ...
    def micro_batches(self, step: Any) -> Any:
        """The micro-batches in a step: `every` of `accumulate_gradients`."""
        if self.micro_batch_size is None:
            raise ValueError(
                "micro_batch_size must be given to batch_plan for micro_batches: the examples of a "
                "micro-batch on each device."
            )
        own = self.micro_batch_size * self.devices
        return self._at(step, [stage.batch_size // own for stage in self.stages])

    def learning_rate(self, step: jax.typing.ArrayLike) -> jax.Array:
        """The learning rate at a step, coupled to its batch size."""
        return self._coupled("learning_rate", self.rate, step, POWERS[self.coupling])

    def weight_decay(self, step: jax.typing.ArrayLike) -> jax.Array:
        """The weight decay at a step."""
        powers = {"decoupled": 1 - POWERS[self.coupling], "independent": 1.0}
        return self._coupled("weight_decay", self.decay, step, powers.get(self.decay_kind, 0.0))

    def examples_at(self, step: Any) -> int:
        """The examples that were seen before a step; exact, for any number of them.

        The step is an integer, also that of an optimizer's state, but not a traced one.
        """
        known = _known(step)
        stage = self._stage(known)
        return stage.first_example + (known - stage.first_step) * stage.batch_size

    def step_at(self, examples: Count | None = None, *, tokens: Count | None = None) -> int:
        """The first step before which so many examples, or tokens, were seen."""
        if (examples is None) == (tokens is None):
            raise ValueError(
                f"step_at takes either examples or tokens, got {examples!r} and {tokens!r}."
            )
        if tokens is not None:
            wanted = -(-count("tokens", tokens) // (self.sequence_length or 1))
        else:
            wanted = count("examples", examples)
        starts = [stage.first_example for stage in self.stages]
        stage = self.stages[bisect.bisect_left(starts, wanted, lo=1) - 1]
        return stage.first_step + -(-(wanted - stage.first_example) // stage.batch_size)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it.

        Raises:
            TypeError: the learning rate or the weight decay is a function; a number and
                `PlannedRate` are data.
        """
        for name in ("rate", "decay"):
            if callable(value := getattr(self, name)) and type(value) is not PlannedRate:
                raise TypeError(
                    f"a plan with the schedule {value!r} cannot be written as JSON. Pass a number "
                    "or PlannedRate(...) as learning_rate and weight_decay."
                )
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BatchPlan":
        """The plan that `to_json` has written.

        Raises:
            ValueError: it is not the text of a plan.
        """
        try:
            read: Any = json.loads(text)
        except (TypeError, ValueError):
            read = None
        if not _is_a_plan(read):
            raise ValueError(f"text must be what BatchPlan.to_json has written, got {text!r:.60}.")
        read["stages"] = tuple(Stage(*stage) for stage in read["stages"])
        for name in ("rate", "decay"):
            if isinstance(read[name], dict):
                read[name] = PlannedRate(**read[name])
        return cls(**read)

    def __str__(self) -> str:
        return table(self)

    def _stage(self, step: int) -> Stage:
        first_steps = [stage.first_step for stage in self.stages]
        return self.stages[bisect.bisect_right(first_steps, step) - 1]

    def _at(self, step: Any, values: list[int]) -> Any:
        """The value of the stage of a step: an integer for an integer, an array for an array."""
        if isinstance(step, jax.Array | np.ndarray):
            return jnp.asarray(values, jnp.int32)[self._index(self._held(step))]
        return values[self.stages.index(self._stage(_known(step)))]

    def _held(self, step: Any) -> jax.Array:
        """A step as an int32 array, no later than the end of the run."""
        if not isinstance(step, jax.Array | np.ndarray):
            return jnp.asarray(min(_known(step), self.total_steps), jnp.int32)
        if not jnp.issubdtype(step.dtype, jnp.integer):
            raise TypeError(_no_step(step))
        try:
            known = np.asarray(step)
        except jax.errors.TracerArrayConversionError:
            if step.dtype.itemsize < 4:
                step = step.astype(jnp.int32)
            # First the ends, in the step's own type: as an int32 a later step could be negative.
            ends = jnp.asarray([0, self.total_steps], step.dtype)
            return jnp.clip(step, *ends).astype(jnp.int32)
        if (known < 0).any():
            raise ValueError(_no_step(step))
        # By NumPy: without x64 JAX takes the lower 32 bits of a later step.
        held = np.minimum(known.astype(np.uint64), np.uint64(self.total_steps))
        return jnp.asarray(held.astype(np.int32))

    def _index(self, step: jax.Array) -> jax.Array:
        """The number of the stage of a step."""
        first_steps = jnp.asarray([stage.first_step for stage in self.stages], jnp.int32)
        return jnp.maximum(jnp.searchsorted(first_steps, step, side="right") - 1, 0)

    def _coupled(self, name: str, value: Any, step: Any, power: float) -> jax.Array:
        """A number or schedule for the reference batch, at the batch size of a step."""
        if value is None:
            raise ValueError(f"{name} must be given to batch_plan: the plan has none.")
        step = self._held(step)
        index = self._index(step)
        factors = [(x.batch_size / self.reference_batch_size) ** power for x in self.stages]
        factor = jnp.asarray(factors, float)[index]
        if not callable(value):
            return factor * value
        try:
            own: Any = value(self._seen(step, index))
        except OverflowError as error:
            raise ValueError(
                f"{name}: the schedule does not take so many examples as integers of 32 bits. Give "
                "its lengths as floats, such as 1e13, or use PlannedRate."
            ) from error
        if jnp.shape(own) not in ((), step.shape):
            raise ValueError(
                f"{name}: what the schedule returns must be one number, got an array of the shape "
                f"{jnp.shape(own)}."
            )
        return factor * own

    def _seen(self, step: jax.Array, index: jax.Array) -> jax.Array:
        """The examples (or tokens) before a step. As floats: they do not fit into int32."""
        tokens = self.sequence_length or 1
        first = jnp.asarray([float(stage.first_example * tokens) for stage in self.stages])
        each = jnp.asarray([float(stage.batch_size * tokens) for stage in self.stages])
        since = step - jnp.asarray([stage.first_step for stage in self.stages], jnp.int32)[index]
        seen = first[index] + since.astype(each.dtype) * each[index]
        return jnp.minimum(seen, float(self.examples * tokens))


def _known(step: Any) -> int:
    """A step as a Python integer; also that of an array that is not traced."""
    number = integer(step)
    if number is None:
        raise TypeError(_no_step(step))
    if number < 0:
        raise ValueError(_no_step(step))
    return number


def _no_step(step: Any) -> str:
    return f"step must be an integer of 0 or more, got {step!r}."


def _is_a_plan(read: Any) -> bool:
    """Whether JSON has the fields of a plan, of its stages and of its schedules."""
    return (
        _has_fields(read, BatchPlan)
        and isinstance(read["stages"], list)
        and all(isinstance(x, list) and len(x) == len(Stage._fields) for x in read["stages"])
        and all(
            _has_fields(read[name], PlannedRate)
            for name in ("rate", "decay")
            if isinstance(read[name], dict)
        )
    )


def _has_fields(read: Any, kind: Any) -> bool:
    return isinstance(read, dict) and set(read) == {x.name for x in dataclasses.fields(kind)}
