"""Batch sizes that grew over a published run, as plans."""

from typing import Any

from optax_largebatch.arguments import check_integer
from optax_largebatch.plans.batch_plan import batch_plan
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.growth import Growth
from optax_largebatch.plans.plan import BatchPlan
from optax_largebatch.plans.stages import Start, starts_of
from optax_largebatch.recipes.calls import given
from optax_largebatch.recipes.catalogue import Entry, check_said, find


def ramp(
    name: str,
    total: Count | None = None,
    *,
    increment: int | None = None,
    **settings: Any,
) -> BatchPlan:
    r"""The plan of a run whose batch size grew, as its source gives it.

    A ramp that rises linearly from :math:`B_0` to :math:`B_1` over :math:`N` tokens, in increments
    of :math:`b`, has stages of equal widths. This is Megatron's `--rampup-batch-size`:

    .. math:: B(x) = B_0 + b \left\lfloor \frac{x (B_1 - B_0)}{N b} \right\rfloor, \qquad x \le N

    With a `run`, the learning rate follows the batch size as it did in the published run. If a
    source leaves out a setting, nothing is filled in: you have to pass it.

    Args:
        name: one of `names("ramps")`, or words that no other has.
        total: the tokens of your run, an integer or a string such as `"1T"`; None for those of
            the published run. The ramp stays where it was, unless its source counts in parts of
            the run.
        increment: what a linear ramp adds to the batch size at once; None for that of the source.
        **settings: other arguments of `batch_plan`: `run`, another `law`, `micro_batch_size`, ...

    Returns:
        The plan. Its `note` names the run and the source.

    Raises:
        ValueError: there is no such ramp; a setting that the source leaves out is missing; an
            argument is out of its range.

    Examples:
        >>> from optax_largebatch import recipes
        >>> plan = recipes.ramp("olmo-1b")
        >>> print([stage.batch_size for stage in plan.stages], plan.total_steps)
        [1024, 2048, 4096] 86249
        >>> plan = recipes.ramp("deepseek-v3", increment=3072, micro_batch_size=4, devices=256)
        >>> print(plan)
         from  batch   micro-  tokens
         step   size  batches    seen
            0   3072        3       0
         9319   6144        6  117.3B
        13978   9216        9  234.5B
        17084  12288       12  351.8B
        19414  15360       15    469B
        247199 steps for 3.613B examples, 14.8T tokens; a constant batch of 3072 takes
        1176199.
        Stages: DeepSeek-V3 671B, 14.8 trillion tokens; arXiv 2412.19437, section 4.2.
        The batch size rises gradually; the source does not say in which increments. The
        rate is constant from step 2000 to 10T tokens, while the batch size grows.
        14.8T tokens: at best 1x the time on the same devices, 0.504x on 2x as many,
        0.21x on 5x as many.
    """
    entry = find(name)
    if entry["field"] != "ramps":
        raise ValueError(
            f"name must be that of a ramp; {entry['name']!r} is a recipe, for recipes.get."
        )
    check_said(entry, given(total=total, increment=increment))
    end = count("total", entry["total"] if total is None else total, at_least=1)
    starts = _starts(entry, increment)
    if entry.get("counted_in") == "percent":
        starts = [(-(-end * part // 100), batch) for part, batch in starts]
    note = f"{entry['task']}; {entry['source']}. {entry['note']}".removesuffix(".")
    return batch_plan(
        Growth(note, lambda seen, rate: starts),
        total=end,
        sequence_length=entry["sequence_length"],
        **({"law": entry["law"]} if settings.get("run") is not None else {}) | settings,
    )


def _starts(entry: Entry, increment: int | None) -> list[Start]:
    """The stages as they are counted in the source; a linear ramp has equally wide ones."""
    if "linear" not in entry:
        if increment is not None:
            raise ValueError(
                f"increment must be None for {entry['name']!r}, whose stages are listed; got "
                f"{increment!r}."
            )
        return starts_of(entry["stages"])
    linear = entry["linear"]
    step = linear.get("increment") if increment is None else increment
    check_integer("increment", step, at_least=1)
    rise = linear["last"] - linear["first"]
    if rise % step:
        raise ValueError(
            f"increment must divide {rise}, by which the batch size of {entry['name']!r} rises "
            f"({linear['first']} to {linear['last']}); got {increment}."
        )
    length = count("length", linear["length"])
    times = rise // step
    return [(-(-j * length // times), linear["first"] + j * step) for j in range(times + 1)]
