"""The plan of a run as plain data, which answers for each step."""

import bisect
import dataclasses
import json
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.arguments import check_choice
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.coupling import DECAY_KINDS, POWERS, Coupling, DecayKind
from optax_largebatch.plans.planned_rate import PlannedRate
from optax_largebatch.plans.stages import Stage
from optax_largebatch.plans.table import table

LARGEST_STEP = 2**31 - 1
"""Counters of steps are int32; counters of examples, which grow faster, are floats."""


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
        own = (self.micro_batch_size or 1) * self.devices
        for stage in self.stages:
            if stage.batch_size % own:
                lower = stage.batch_size // own * own
                raise ValueError(
                    "stages must have batch sizes that are multiples of micro_batch_size x devices "
                    f"= {self.micro_batch_size or 1} x {self.devices} = {own}, got "
                    f"{stage.batch_size}. Take {f'{lower} or ' if lower else ''}{lower + own}, or "
                    "another micro-batch."
                )
        if self.total_steps > LARGEST_STEP:
            raise ValueError(
                f"the run has {self.total_steps} steps, more than the {LARGEST_STEP} that the "
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
        power = 1 - POWERS[self.coupling] if self.decay_kind == "decoupled" else 0.0
        return self._coupled("weight_decay", self.decay, step, power)

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
        read = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(read, dict) or set(read) != names:
            raise ValueError(f"text must be what BatchPlan.to_json has written, got {text[:60]!r}.")
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
        step = jnp.asarray(step)
        if step.dtype.itemsize < 4:
            step = step.astype(jnp.int32)
        # First the end, in the step's own type: as an int32 a later step could be negative.
        return jnp.minimum(step, jnp.asarray(self.total_steps, step.dtype)).astype(jnp.int32)

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
    is_one = getattr(step, "shape", ()) == () and not isinstance(step, bool | np.bool_)
    if is_one and hasattr(step, "__index__") and int(step) >= 0:
        return int(step)
    raise (ValueError if is_one and hasattr(step, "__index__") else TypeError)(
        f"step must be an integer of 0 or more, got {step!r}."
    )
