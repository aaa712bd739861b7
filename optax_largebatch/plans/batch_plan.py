"""A plan of a run: the batch size at each step, and the numbers that move with it."""

import bisect
import dataclasses
import json
from typing import Any, overload

import jax
import jax.numpy as jnp

from optax_largebatch.arguments import check_choice, check_integer, check_number_or_schedule
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.coupling import DECAY_KINDS, POWERS, Coupling, DecayKind
from optax_largebatch.plans.growth import Growth
from optax_largebatch.plans.planned_rate import PlannedRate
from optax_largebatch.plans.stages import Stage, Start, stages_of, starts_of
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

    def examples_at(self, step: int) -> int:
        """The examples that were seen before a step; exact, for any number of them."""
        check_integer("step", step, at_least=0)
        stage = self._stage(step)
        return stage.first_example + (int(step) - stage.first_step) * stage.batch_size

    def step_at(self, examples: Count) -> int:
        """The first step before which so many examples were seen; the inverse of `examples_at`."""
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
        return json.dumps(dataclasses.asdict(self), default=_not_data)

    @classmethod
    def from_json(cls, text: str) -> "BatchPlan":
        """The plan that `to_json` has written."""
        read = json.loads(text)
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
        if isinstance(step, jax.Array):
            return jnp.asarray(values, jnp.int32)[self._index(step)]
        check_integer("step", step, at_least=0)
        return values[self.stages.index(self._stage(step))]

    def _index(self, step: jax.Array) -> jax.Array:
        """The number of the stage of a step."""
        first_steps = [min(stage.first_step, LARGEST_STEP) for stage in self.stages]
        known = jnp.asarray(first_steps, jnp.int32)
        found = jnp.searchsorted(known, step.astype(jnp.int32), side="right")
        return jnp.maximum(found - 1, 0)

    def _coupled(self, name: str, value: Any, step: Any, power: float) -> jax.Array:
        """A number or schedule for the reference batch, at the batch size of a step."""
        if value is None:
            raise ValueError(f"{name} must be given to batch_plan: the plan has none.")
        if not isinstance(step, jax.Array):
            check_integer("step", step, at_least=0)
        step = jnp.minimum(jnp.asarray(step, jnp.int32), min(self.total_steps, LARGEST_STEP))
        index = self._index(step)
        factors = [(x.batch_size / self.reference_batch_size) ** power for x in self.stages]
        factor = jnp.asarray(factors, float)[index]
        own: Any = value(self._seen(step, index)) if callable(value) else value
        return factor * own

    def _seen(self, step: jax.Array, index: jax.Array) -> jax.Array:
        """The examples (or tokens) before a step. As floats: they do not fit into int32."""
        tokens = self.sequence_length or 1
        first = jnp.asarray([float(stage.first_example * tokens) for stage in self.stages])
        each = jnp.asarray([float(stage.batch_size * tokens) for stage in self.stages])
        since = step - jnp.asarray([stage.first_step for stage in self.stages], jnp.int32)[index]
        seen = first[index] + since.astype(each.dtype) * each[index]
        return jnp.minimum(seen, float(self.examples * tokens))


def batch_plan(
    stages: "Growth | str | dict[Count, Count] | list[Start] | int",
    total: Count,
    *,
    sequence_length: int | None = None,
    learning_rate: Any = None,
    coupling: Coupling = "sqrt",
    weight_decay: Any = None,
    decay_kind: DecayKind = "decoupled",
    reference_batch_size: Count | None = None,
    micro_batch_size: int | None = None,
    devices: int = 1,
) -> BatchPlan:
    r"""Plans the batch size over a run, and the learning rate and weight decay that go with it.

    The batch size is that of the last stage whose start was seen before the step. After :math:`x`
    examples, with the batch size :math:`B`, and :math:`B_0` the reference:

    .. math::

        \eta = S(x) (B / B_0)^p, \qquad \lambda = \Lambda(x) (B / B_0)^{1 - p}

    :math:`p` is 1/2 (`"sqrt"`), 1 (`"linear"`) or 0 (`"none"`). The decay of each example then
    stays what it is at the reference: its timescale :math:`B / (\eta \lambda)` is kept.

    Args:
        stages: where each batch size begins. A string in the way of Megatron,
            `"0:512 2M:2048 20M:16384"`; a dict or a list of pairs of the same numbers; one batch
            size for the whole run; or a rule, `seesaw(...)` or `within_critical_batch_size(...)`.
            A start may lie inside a batch: the next step has the new size.
        total: the examples of the run; an integer, or a string such as `"100M"`.
        sequence_length: the tokens of an example. If it is given, the starts of stages, `total` and
            what schedules are called with are numbers of tokens. Batch sizes stay examples.
        learning_rate: :math:`S`, for the reference batch size: a number, or a schedule of the
            *examples seen* and not of steps, such as `PlannedRate`.
        coupling: how the learning rate follows the batch size. `"sqrt"` for Adam, Muon, LAMB and
            all that normalise the gradient; `"linear"` for SGD.
        weight_decay: :math:`\Lambda`, a number or a schedule of the examples seen.
        decay_kind: `"decoupled"` as above, for decay that is multiplied by the learning rate, as in
            AdamW and Muon. Others are kept: `"l2"`, which is a part of the loss, and `"rescaled"`,
            for LAMB and LARS, whose trust ratio rescales the step together with the decay.
        reference_batch_size: :math:`B_0`, the batch size that `learning_rate` and `weight_decay`
            are for; None for that of the first stage.
        micro_batch_size: the examples of a micro-batch on one device, if gradients are accumulated.
        devices: the devices that share each micro-batch.

    Returns:
        The plan.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range; a stage begins after the end; a batch is not a
            whole number of micro-batches on all devices.

    Examples:
        >>> from optax_largebatch import PlannedRate, batch_plan
        >>> plan = batch_plan(
        ...     "0:512 200k:2048 500k:8192", total="2M", weight_decay=0.1,
        ...     learning_rate=PlannedRate(1e-3, "2M", warmup="50k", decay="cosine"))
        >>> print(plan)
        from  batch  examples
        step   size      seen        learning rate  weight decay
           0    512         0        0 to 0.000986           0.1
         391   2048    200.2k   0.00197 to 0.00175           0.2
         538   8192    501.2k  0.00349 to 1.58e-07           0.4
        721 steps for 2M examples.
        A constant batch of 512 takes 3907 steps; the plan 18% of that.

    References:
        The timescale of weight decay: Wang and Aitchison, *How to set AdamW's weight decay as you
        scale model and dataset size*, arXiv 2405.13698. Batch warm-up: Merrill et al., *Critical
        Batch Size Revisited*, arXiv 2505.23971.
    """
    check_choice("coupling", coupling, tuple(POWERS))
    check_choice("decay_kind", decay_kind, DECAY_KINDS)
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if value is not None:
            check_number_or_schedule(name, value, "[0, inf)")
    lengths = {"sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    for name, value in lengths.items():
        if value is not None:
            check_integer(name, value, at_least=1)
    check_integer("devices", devices, at_least=1)

    seen = count("total", total, at_least=1)
    grown = isinstance(stages, Growth)
    starts = starts_of(stages.starts(seen, learning_rate) if grown else stages)
    if starts[-1][0] >= seen:
        raise ValueError(
            f"stages must all begin before the end of the run, {seen}; the last one begins at "
            f"{starts[-1][0]}. Give a larger total, or leave the stage out."
        )
    tokens = sequence_length or 1
    examples = -(-seen // tokens)
    in_examples = [(-(-start // tokens), batch) for start, batch in starts]
    found, total_steps = stages_of(in_examples, examples)
    for stage in found:
        _check_divides(stage.batch_size, micro_batch_size or 1, devices)
    reference = found[0].batch_size if reference_batch_size is None else reference_batch_size
    return BatchPlan(
        stages=found,
        total_steps=total_steps,
        examples=examples,
        sequence_length=sequence_length,
        rate=_data(learning_rate),
        decay=_data(weight_decay),
        coupling=coupling,
        decay_kind=decay_kind,
        reference_batch_size=count("reference_batch_size", reference, at_least=1),
        micro_batch_size=micro_batch_size,
        devices=devices,
        note=stages.note if grown else "",
    )


def _check_divides(batch_size: int, micro_batch_size: int, devices: int) -> None:
    own = micro_batch_size * devices
    if batch_size % own:
        lower = batch_size // own * own
        nearest = f"{lower} or {lower + own}" if lower else f"{own}"
        raise ValueError(
            f"stages must have batch sizes that are multiples of micro_batch_size x devices = "
            f"{micro_batch_size} x {devices} = {own}, got {batch_size}. Take {nearest}, or another "
            "micro-batch."
        )


def _data(value: Any) -> Any:
    """A number as a float, so that plans compare and can be written; or what is no number."""
    return value if value is None or callable(value) else float(value)


def _not_data(value: Any) -> Any:
    raise TypeError(
        f"a plan with the function {value!r} cannot be written as JSON. Pass a number or "
        "PlannedRate(...) as learning_rate and weight_decay."
    )
