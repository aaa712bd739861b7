"""Plans a run: the batch size at each step, and the numbers that move with it."""

from typing import Any

from optax_largebatch.arguments import check_integer
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.growth import Growth
from optax_largebatch.plans.plan import BatchPlan
from optax_largebatch.plans.stages import Start, stages_of, starts_of
from optax_largebatch.plans.tuned_run import TunedRun, law_of


def batch_plan(
    stages: "Growth | str | dict[Count, Count] | list[Start] | int",
    *,
    total: Count,
    sequence_length: int | None = None,
    run: TunedRun | None = None,
    law: str | None = None,
    micro_batch_size: int | None = None,
    devices: int = 1,
) -> BatchPlan:
    r"""Plans the batch size over a run, and moves the numbers of a tuned run to it.

    The batch size is that of the last stage whose start was seen before the step; a constant batch
    is a plan of one stage. With :math:`k` the batch size of a step over that of the tuned run,
    :math:`r` the examples of the new run over those of the tuned one, and :math:`S(x)` its rate
    after :math:`x` examples:

    .. math::

        \begin{array}{ll}
        \text{learning rate} & \sqrt{k}\, r^{-0.32}\, S(x / r) \\
        \text{momentum, } b_1 & 1 - b \to (1 - b)\, k / \sqrt{r}, \quad b \ge 0.7 \\
        b_2 & b_2 \to b_2^k, \quad 0.95 \le b_2 \le 0.9999 \\
        \text{decay} & B / (\eta \lambda) \text{ stays the same part of the run} \\
        \epsilon & \epsilon \to \epsilon \sqrt{r / k}
        \end{array}

    so the warm-up stays the same part of the run. This is the row of AdamW, Muon, MuonH, AdamH,
    LAMB and LANS; `law` chooses another.

    Args:
        stages: where each batch size begins. A string in the way of Megatron,
            `"0:512 2M:2048 20M:16384"`; a dict or a list of pairs of the same numbers; one batch
            size for the whole run; or a rule, `seesaw(...)` or `within_critical_batch_size(...)`.
            A start may lie inside a batch: the next step has the new size. A stage that is shorter
            than a batch of the stage before may have no step.
        total: the examples of the run; an integer, or a string such as `"100M"`.
        sequence_length: the tokens of an example. If it is given, the starts of stages, `total` and
            the numbers of `run` are numbers of tokens. Batch sizes stay examples.
        run: the run whose numbers are moved; None for a plan of batch sizes alone. A plan for
            another optimizer takes `run.to("muonh")`.
        law: how the numbers move; None for the row of the optimizer. `"kept"` keeps them all, to
            compare with. Published ones: `"sqrt"`, `"adam_sde"`, `"legew"`, `"token_half_life"`,
            `"marin"`; `"sgd"` is the linear rule.
        micro_batch_size: the examples of a micro-batch on one device, if gradients are accumulated.
        devices: the devices that share each micro-batch.

    Returns:
        The plan: print it for its table, what was moved, and why. The last line compares its time
        with that of the tuned run (or of a constant batch), on as many devices and on more of them,
        if a step takes as long as its examples on one device. A device takes no fewer of them in a
        step than in the run before.

    Raises:
        ValueError: an argument is out of its range; a stage begins after the end; a batch is not a
            whole number of micro-batches on all devices.

    Examples:
        >>> from optax_largebatch import PlannedRate, TunedRun, batch_plan
        >>> run = TunedRun(
        ...     "adamw", batch_size=512, total="2M", weight_decay=0.1,
        ...     learning_rate=PlannedRate(1e-3, warmup="50k"))
        >>> plan = batch_plan("0:512 200k:2048 500k:8192", total="2M", run=run)
        >>> print(plan)
        from  batch  examples                learning  weight
        step   size      seen                    rate   decay   b1
           0    512         0  0 to 0.001 to 0.000986     0.1  0.9
         391   2048    200.2k      0.00197 to 0.00175     0.2  0.7
         538   8192    501.2k     0.00349 to 1.58e-07     0.4  0.7
        721 steps for 2M examples; the tuned run at 512 takes 3907.
        From adamw at 512 to 8192 by the law 'adamw' (k = 16):
          peak rate      0.001 -> 0.004    times sqrt(k); reaches 0.00349
          weight_decay   0.1 -> 0.4        keeps B / (rate decay examples)
          b1             0.9 -> 0.7        (1 - b) times k, at least 0.7
          b2             0.999 -> 0.9841   same half-life in examples
          eps            1e-08 -> 2.5e-09  times 1/sqrt(k), all stages
        Valid below the critical batch size, for networks of the same width.
        Assumed: b1, b2, eps.
        If you can search, try the peaks 0.001, 0.002, 0.004 (the plan's), 0.008.
        2M examples: at best 1x the time on the same devices, 0.55x on 2x as many,
        0.185x on 16x as many.

    References:
        The sources of each row are in `optax_largebatch.plans.law.LAWS`. The timescale of weight
        decay: Wang and Aitchison, *How to set AdamW's weight decay as you scale model and dataset
        size*, arXiv 2405.13698. Batch warm-up: Merrill et al., *Critical Batch Size Revisited*,
        arXiv 2505.23971.
    """
    check_integer("devices", devices, at_least=1)
    if sequence_length is not None:
        check_integer("sequence_length", sequence_length, at_least=1)
    if micro_batch_size is not None:
        check_integer("micro_batch_size", micro_batch_size, at_least=1)

    seen = count("total", total, at_least=1)
    if not isinstance(run, TunedRun | None):
        raise TypeError(f"run must be a TunedRun(...) or None, got {run!r}.")
    if law is not None and run is None:
        raise ValueError(f"run must be given with law={law!r}, which moves its numbers; got None.")
    grown = isinstance(stages, Growth)
    if run is not None:
        law = run.optimizer if law is None else law
        rate = law_of(run, law).learning_rate
        if grown and stages.is_coupled and not rate.batch:
            raise ValueError(
                f"law must move the learning rate with the batch for seesaw, got {law!r}: where "
                "the batch doubles, the learning rate must not halve as well."
            )
    starts = starts_of(stages.starts(seen, _rate_over(run, seen)) if grown else stages)
    if starts[-1][0] >= seen:
        raise ValueError(
            f"stages must all begin before the end of the run, {seen}; the last one begins at "
            f"{starts[-1][0]}. Give a larger total, or leave the stage out."
        )
    tokens = int(sequence_length or 1)
    examples = -(-seen // tokens)
    in_examples = [(-(-start // tokens), batch) for start, batch in starts]
    with_steps, total_steps = stages_of(in_examples, examples)
    return BatchPlan(
        stages=with_steps,
        total_steps=total_steps,
        examples=examples,
        sequence_length=sequence_length,
        run=run,
        law=law,
        micro_batch_size=micro_batch_size,
        devices=devices,
        note=stages.note if grown else "",
    )


def _rate_over(run: TunedRun | None, total: int) -> Any:
    """The learning rate of a run, over a run of another length."""
    if run is None:
        return None
    rate: Any = run.learning_rate
    return (lambda seen: rate(seen / (total / int(run.total)))) if callable(rate) else rate
