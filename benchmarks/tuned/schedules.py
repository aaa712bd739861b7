"""The batches of a run and its learning rate, both as an `lb.batch_plan`.

A constant batch is a plan of one stage. The rate of every plan grows for an eighth of the examples
and then falls in a straight line to 0. Rate and decay of the plan are in units of those that are
tuned.
"""

import optax_largebatch as lb

WARMUP = 1 / 8


def schedule(stages: str | lb.Growth, examples: int) -> lb.BatchPlan:
    """The plan of a run over so many examples."""
    warmup = round(WARMUP * examples)
    rate = lb.PlannedRate(1.0, total=examples, warmup=warmup, decay="linear")
    return lb.batch_plan(stages, total=examples, learning_rate=rate, weight_decay=1.0)


def constant(steps: dict[int, int]) -> dict[str, lb.BatchPlan]:
    """Plans of one batch size each, from the steps at each."""
    return {
        str(batch_size): schedule(f"0:{batch_size}", batch_size * own)
        for batch_size, own in steps.items()
    }


def ramps(batch_size: int, examples: int) -> dict[str, lb.BatchPlan]:
    """Plans of as many examples: a constant batch, four times that, and two ways between them."""
    small, large = batch_size, 4 * batch_size
    return {
        "constant": schedule(f"0:{small}", examples),
        "four_times": schedule(f"0:{large}", examples),
        "two_stages": schedule(f"0:{small} {examples // 4}:{large}", examples),
        "seesaw": schedule(lb.seesaw(small, largest_batch=8 * small), examples),
    }


def written(plan: lb.BatchPlan) -> str:
    """The stages of a plan in a line, such as `0:128 16384:512 65536`."""
    stages = [f"{stage.first_example}:{stage.batch_size}" for stage in plan.stages]
    return " ".join([*stages, str(plan.examples)])
