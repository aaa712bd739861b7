"""Plans a run: the batch size at each step, and the numbers that move with it."""

from typing import Any

from optax_largebatch.arguments import check_integer
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.coupling import Coupling, DecayKind
from optax_largebatch.plans.growth import Growth
from optax_largebatch.plans.plan import BatchPlan
from optax_largebatch.plans.planned_rate import planned
from optax_largebatch.plans.stages import Start, stages_of, starts_of


def batch_plan(
    stages: "Growth | str | dict[Count, Count] | list[Start] | int",
    *,
    total: Count,
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
            A start may lie inside a batch: the next step has the new size. A stage that is shorter
            than a batch of the stage before may have no step.
        total: the examples of the run; an integer, or a string such as `"100M"`.
        sequence_length: the tokens of an example. If it is given, the starts of stages, `total` and
            what schedules are called with are numbers of tokens. Batch sizes stay examples.
        learning_rate: :math:`S`, for the reference batch size: a number, or a schedule of the
            *examples seen* and not of steps, such as `PlannedRate`. For optax's schedules give
            lengths beyond 2 billion as floats, such as 1e13.
        coupling: how the learning rate follows the batch size. `"sqrt"` for Adam, Muon, LAMB and
            all that normalise the gradient; `"linear"` for SGD.
        weight_decay: :math:`\Lambda`, a number or a schedule of the examples seen. It is taken for
            one beside a learning rate that follows `coupling`, even if that is not given here.
        decay_kind: `"decoupled"` as above, for decay that is multiplied by the learning rate, as in
            AdamW and Muon. `"independent"`, where the parameters shrink by the decay itself or by
            its product with the shape of the schedule, as in midGPT and nanodo: it follows
            :math:`B / B_0`. Others are kept: `"l2"`, which is a part of the loss, and
            `"rescaled"`, for LAMB and LARS, whose trust ratio rescales the step together with the
            decay.
        reference_batch_size: the batch size at which your `learning_rate` and `weight_decay` were
            tuned. :math:`B_0`; None for that of the first stage.
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
        ...     learning_rate=PlannedRate(1e-3, total="2M", warmup="50k", decay="cosine"))
        >>> print(plan)
        from  batch  examples
        step   size      seen        learning rate  weight decay
           0    512         0        0 to 0.000986           0.1
         391   2048    200.2k   0.00197 to 0.00175           0.2
         538   8192    501.2k  0.00349 to 1.58e-07           0.4
        721 steps for 2M examples.
        A constant batch of 512 takes 3907 steps; the plan 18% of that.
        The learning rate is at most 0.00349, near step 538.

    References:
        The timescale of weight decay: Wang and Aitchison, *How to set AdamW's weight decay as you
        scale model and dataset size*, arXiv 2405.13698. Batch warm-up: Merrill et al., *Critical
        Batch Size Revisited*, arXiv 2505.23971.
    """
    lengths = {"sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    given = {name: value for name, value in lengths.items() if value is not None}
    for name, value in (given | {"devices": devices}).items():
        check_integer(name, value, at_least=1)

    seen = count("total", total, at_least=1)
    rate = planned("learning_rate", learning_rate, seen)
    grown = isinstance(stages, Growth)
    if grown and stages.is_coupled and coupling == "none":
        raise ValueError(
            "coupling must be 'sqrt' or 'linear' for seesaw, got 'none': where the batch doubles, "
            "the learning rate must not halve as well. (linear is for SGD.)"
        )
    starts = starts_of(stages.starts(seen, rate) if grown else stages)
    if starts[-1][0] >= seen:
        raise ValueError(
            f"stages must all begin before the end of the run, {seen}; the last one begins at "
            f"{starts[-1][0]}. Give a larger total, or leave the stage out."
        )
    tokens = int(sequence_length or 1)
    examples = -(-seen // tokens)
    in_examples = [(-(-start // tokens), batch) for start, batch in starts]
    found, total_steps = stages_of(in_examples, examples)
    reference = found[0].batch_size if reference_batch_size is None else reference_batch_size
    return BatchPlan(
        stages=found,
        total_steps=total_steps,
        examples=examples,
        sequence_length=sequence_length,
        rate=rate,
        decay=planned("weight_decay", weight_decay, seen),
        coupling=coupling,
        decay_kind=decay_kind,
        reference_batch_size=count("reference_batch_size", reference, at_least=1),
        micro_batch_size=micro_batch_size,
        devices=devices,
        note=stages.note if grown else "",
    )
