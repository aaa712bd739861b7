"""The plan of a run as plain data, which answers for each step."""

import bisect
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_largebatch.arguments import check_number, known_number
from optax_largebatch.plans.counts import Count, count, integer
from optax_largebatch.plans.law import Moved
from optax_largebatch.plans.planned_rate import PlannedRate
from optax_largebatch.plans.stages import Stage, stages_of, starts_of
from optax_largebatch.plans.table import table
from optax_largebatch.plans.tuned_run import TunedRun, law_of

LARGEST_INT32 = 2**31 - 1
"""Steps and batch sizes are int32; numbers of examples, which grow faster, are floats."""

SEARCHED = (0.25, 0.5, 1.0, 2.0)
"""The rates of a search over the plan's own: the law more often overshoots."""


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
    run: TunedRun | None
    """The run whose numbers are moved to the batch sizes; None in a plan of batch sizes alone."""
    law: str | None
    """The row of `LAWS` by which they move, or the name of an optimizer with its own."""
    micro_batch_size: int | None
    """The examples of a micro-batch on each device, if gradients are accumulated."""
    devices: int
    """The devices that share a batch."""
    note: str
    """Where the stages come from, in words."""

    def __post_init__(self) -> None:
        if not isinstance(self.run, TunedRun | None):
            raise TypeError(f"run must be a TunedRun or None, got {self.run!r}.")
        if not isinstance(self.note, str):
            raise TypeError(f"note must be a string, got {self.note!r}.")
        # Also what a text of JSON says, and `dataclasses.replace`, become integers of Python here.
        for name in ("examples", "devices", "sequence_length", "micro_batch_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, count(name, value, at_least=1))
        starts = starts_of([(stage.first_example, stage.batch_size) for stage in self.stages])
        stages, total_steps = stages_of(starts, self.examples)
        if (stages, total_steps) != (self.stages, self.total_steps):
            raise ValueError(
                f"stages and total_steps must be those of a run of {self.examples} examples, "
                f"{stages} and {total_steps}; got {self.stages} and {self.total_steps}. Use "
                "batch_plan(...)."
            )
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "total_steps", total_steps)

        step = (self.micro_batch_size or 1) * self.devices
        for stage in self.stages:
            if stage.batch_size > LARGEST_INT32:
                raise ValueError(
                    f"stages must have batch sizes of at most {LARGEST_INT32}, since arrays of "
                    f"them are int32, got {stage.batch_size}. If you count tokens, give batch "
                    "sizes in examples, and sequence_length."
                )
            if stage.batch_size % step:
                lower = stage.batch_size // step * step
                raise ValueError(
                    "stages must have batch sizes that are multiples of micro_batch_size x devices "
                    f"= {self.micro_batch_size or 1} x {self.devices} = {step}, got "
                    f"{stage.batch_size}. Take {f'{lower} or ' if lower else ''}{lower + step}."
                )
        if self.total_steps > LARGEST_INT32:
            raise ValueError(
                f"the run has {self.total_steps} steps, more than the {LARGEST_INT32} that the "
                "counter of an optimizer holds. Take larger batches, or a smaller total."
            )
        if self.run is not None:
            self._warmed_up()

    def batch_size(self, step: ArrayLike) -> Any:
        """The examples in a step."""
        return self._at(step, [stage.batch_size for stage in self.stages])

    def micro_batches(self, step: ArrayLike) -> Any:
        """The micro-batches in a step: `every` of `accumulate_gradients`."""
        each = self._examples_of_call
        if each is None:
            raise ValueError(
                "micro_batch_size must be given to batch_plan for micro_batches: the examples of a "
                "micro-batch on each device."
            )
        return self._at(step, [stage.batch_size // each for stage in self.stages])

    @property
    def calls(self) -> int:
        """The calls of `update` in the run: micro-batches, if gradients are accumulated."""
        return self.call_of_step(self.total_steps)

    def call_of_step(self, step: int) -> int:
        """The calls of `update` before a step."""
        if self._examples_of_call is None:
            return _known(step)
        return self.examples_at(step) // self._examples_of_call

    def step_of_call(self, call: int) -> int:
        """The step that a call of `update` belongs to; the first call is 0."""
        known = _known(call)
        if self._examples_of_call is None:
            return known
        # The step that takes the first example of the call.
        return self.step_at(known * self._examples_of_call + 1) - 1

    def learning_rate(self, step: ArrayLike) -> jax.Array:
        """The learning rate at a step."""
        return self._schedule("learning_rate", self._warmed_up(), step)

    def weight_decay(self, step: ArrayLike) -> jax.Array:
        """The weight decay at a step."""
        return self._schedule("weight_decay", self._run("weight_decay").weight_decay, step)

    def momentum(self, step: ArrayLike) -> jax.Array:
        """The decay rate of the momentum (Muon's `beta`) at a step."""
        return self._schedule("momentum", 1.0, step)

    def b1(self, step: ArrayLike) -> jax.Array:
        """The decay rate of the first moment at a step."""
        return self._schedule("b1", 1.0, step)

    def b2(self, step: ArrayLike) -> jax.Array:
        """The decay rate of the second moment at a step."""
        return self._schedule("b2", 1.0, step)

    @property
    def eps(self) -> float:
        """Adam's epsilon, that of the last stage: optimizers take no schedule of it."""
        return self._of_stages("eps")[-1]

    @property
    def length(self) -> float:
        """The examples of the run over those of the run that was tuned."""
        tokens = self.sequence_length or 1
        return self.examples / -(-int(self._run("length").total) // tokens)

    @property
    def rates(self) -> tuple[float, ...]:
        """Four peaks of the learning rate for a search: the plan's own is the third."""
        peak = self._run("rates").known_peak * max(self._of_stages("learning_rate"))
        return tuple(peak * times for times in SEARCHED)

    def with_peak(self, learning_rate: float) -> "BatchPlan":
        """The plan with another peak of the learning rate, such as one of `rates`."""
        peak = known_number("learning_rate", learning_rate, "(0, inf)")
        run = self._run("with_peak")
        of_run = peak / max(self._of_stages("learning_rate"))
        return dataclasses.replace(self, run=run.with_peak(of_run))

    def moved(self, batch_size: int) -> dict[str, Moved]:
        """The numbers at a batch size, each with its reason; of rate and decay the factors."""
        run = self._run("moved")
        k = batch_size / int(run.batch_size)
        return law_of(run, self.law).moved(run.numbers, run.kind, k, self.length)

    def examples_at(self, step: Any) -> int:
        """The examples that were seen before a step; exact, for any number of them.

        The step is an integer, also that of an optimizer's state, but not a traced one.
        """
        known = _known(step)
        stage = self.stages[self._number_of_stage(known)]
        return stage.first_example + (known - stage.first_step) * stage.batch_size

    def step_at(
        self,
        examples: Count | None = None,
        *,
        tokens: Count | None = None,
    ) -> int:
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

    def in_steps(self, examples: Count) -> Any:
        """A length in examples (or tokens) as a schedule of steps, which fall as the batch grows.

        It is the half-life of an average of the weights: `average_weights(...,
        half_life=plan.in_steps("1M"))` keeps it in examples.
        """
        length = float(count("examples", examples, at_least=1)) / (self.sequence_length or 1)
        return lambda step: length / jnp.asarray(self.batch_size(step), float)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it.

        Raises:
            TypeError: the learning rate or the weight decay is a function; a number and
                `PlannedRate` are data.
        """
        for name in ("learning_rate", "weight_decay") if self.run else ():
            if callable(value := getattr(self.run, name)) and type(value) is not PlannedRate:
                raise TypeError(
                    f"a plan with the schedule {value!r} cannot be written as JSON. Give the run a "
                    f"number or PlannedRate(...) as {name}."
                )
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BatchPlan":
        """The plan that `to_json` has written.

        Raises:
            ValueError: it is not the text of a plan.
        """
        no_plan = f"text must be what BatchPlan.to_json has written, got {text!r:.60}."
        try:
            read: Any = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(no_plan) from error
        try:
            if run := read["run"]:
                for name in ("learning_rate", "weight_decay"):
                    if isinstance(run[name], dict):
                        run[name] = PlannedRate(**run[name])
                read["run"] = TunedRun(**run)
            read["stages"] = tuple(Stage(*stage) for stage in read["stages"])
            return cls(**read)
        except (KeyError, TypeError) as error:
            raise ValueError(no_plan) from error

    def __str__(self) -> str:
        with jax.ensure_compile_time_eval():  # a plan may be printed while a program is traced
            return table(self, self._warmed_up() if self.run else None)

    def _number_of_stage(self, step: int) -> int:
        return bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1

    def _at(self, step: Any, values: list[int]) -> Any:
        """The value of the stage of a step: an integer for an integer, an array for an array."""
        if isinstance(step, jax.Array | np.ndarray):
            return jnp.asarray(values, jnp.int32)[self._index(self._held(step))]
        return values[self._number_of_stage(_known(step))]

    def _held(self, step: Any) -> jax.Array:
        """A step as an int32 array, no later than the end of the run."""
        if not isinstance(step, jax.Array | np.ndarray):
            return jnp.asarray(min(_known(step), self.total_steps), jnp.int32)
        if not jnp.issubdtype(step.dtype, jnp.integer):
            raise TypeError(_no_step(step))
        # In the step's own type: as an int32 a later step could be negative.
        last = min(self.total_steps, jnp.iinfo(step.dtype).max)
        try:
            known = np.asarray(step)
        except jax.errors.TracerArrayConversionError:
            return jnp.clip(step, 0, last).astype(jnp.int32)
        if (known < 0).any():
            raise ValueError(_no_step(step))
        # By NumPy: without x64 JAX takes the lower 32 bits of a later step.
        return jnp.asarray(np.minimum(known, last).astype(np.int32))

    def _index(self, step: jax.Array) -> jax.Array:
        """The number of the stage of a step."""
        first_steps = jnp.asarray([stage.first_step for stage in self.stages], jnp.int32)
        return jnp.searchsorted(first_steps, step, side="right") - 1

    @property
    def _examples_of_call(self) -> int | None:
        """The examples of a micro-batch on all devices; None if gradients are not accumulated."""
        return self.micro_batch_size and self.micro_batch_size * self.devices

    def _run(self, name: str) -> TunedRun:
        if self.run is None:
            raise ValueError(
                f"run must be given to batch_plan for {name}: a TunedRun says for which batch size "
                "the numbers are, and the plan moves them."
            )
        return self.run

    def _warmed_up(self) -> Any:
        """The learning rate of the tuned run, with another warm-up if the law asks for one."""
        run = self._run("learning_rate")
        rate: Any = run.learning_rate
        if not law_of(run, self.law).keeps_warmup_steps or not callable(rate):
            return rate
        if not isinstance(rate, PlannedRate):
            raise ValueError(f"learning_rate must be a PlannedRate for {self.law!r}, got {rate!r}.")
        batch = self.stages[-1].batch_size
        tokens = self.sequence_length or 1
        steps = round(int(rate.warmup) / int(run.batch_size) / tokens)
        if steps * batch >= self.examples:
            raise ValueError(
                f"law: legew keeps the {steps} steps of the warm-up, and the run has "
                f"{self.total_steps} of {batch} examples. Take a smaller batch, or 'sqrt'."
            )
        return dataclasses.replace(rate, warmup=round(steps * batch * tokens / self.length))

    def _of_stages(self, name: str) -> list[float]:
        """A number at each stage; of rate and decay the factor."""
        run = self._run(name)
        if "_" not in name and name not in run.numbers:
            raise ValueError(f"{run.optimizer} has no {name}: it has {', '.join(run.numbers)}.")
        return [self.moved(stage.batch_size)[name].value for stage in self.stages]

    def _schedule(self, name: str, value: Any, step: Any) -> jax.Array:
        """A number or a schedule of the tuned run, moved to the batch size of a step."""
        step = self._held(step)
        index = self._index(step)
        factor = jnp.asarray(self._of_stages(name), float)[index]
        if not callable(value):
            return factor * value
        try:
            there: Any = value(self._seen(step, index) / self.length)
        except OverflowError as error:
            raise ValueError(
                f"{name}: the schedule does not take so many examples as integers of 32 bits. Give "
                "its lengths as floats, such as 1e13, or use PlannedRate."
            ) from error
        if not jnp.ndim(there):
            check_number(f"{name}: what the schedule returns", there, "(-inf, inf)")
        if jnp.shape(there) not in ((), step.shape):
            raise ValueError(
                f"{name}: the schedule must return one number, got the shape {jnp.shape(there)}."
            )
        return factor * there

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
