"""The batches of a run and its learning rate, both as an `lb.batch_plan`.

A constant batch is a plan of one stage. The rate of every plan grows for an eighth of the examples
and then falls in a straight line to 0. Rate and decay of the plan are in units of those that are
tuned.
"""

import optax_largebatch as lb

WARMUP = 1 / 8


def schedule(batch_size: int, examples: int, stages: str | lb.Growth | None = None) -> lb.BatchPlan:
    """The plan of a run over so many examples, constant or from a first batch size on."""
    rate = lb.PlannedRate(1.0, warmup=round(WARMUP * examples), decay="linear")
    run = lb.TunedRun(
        "adamw", batch_size=batch_size, total=examples, learning_rate=rate, weight_decay=1.0
    )
    return lb.batch_plan(stages or batch_size, total=examples, run=run, law="sqrt")


def constant(steps: dict[int, int]) -> dict[str, lb.BatchPlan]:
    """Plans of one batch size each, from the steps at each."""
    return {
        str(batch_size): schedule(batch_size, batch_size * own) for batch_size, own in steps.items()
    }


def ramps(batch_size: int, examples: int) -> dict[str, lb.BatchPlan]:
    """Plans of as many examples: a constant batch, four times that, and two ways between them."""
    small, large = batch_size, 4 * batch_size
    return {
        "constant": schedule(small, examples),
        "four_times": schedule(large, examples),
        "two_stages": schedule(small, examples, f"0:{small} {examples // 4}:{large}"),
        "seesaw": schedule(small, examples, lb.seesaw(small, largest_batch=8 * small)),
    }


def written(plan: lb.BatchPlan) -> str:
    """The stages of a plan in a line, such as `0:128 16384:512 65536`."""
    stages = [f"{stage.first_example}:{stage.batch_size}" for stage in plan.stages]
    return " ".join([*stages, str(plan.examples)])
