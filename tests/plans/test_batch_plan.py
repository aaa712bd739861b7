"""A plan compared with a plain loop over a run, and what it refuses."""

import dataclasses
import math
import pickle
import time

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.plans.runs import tuned

POWERS = {"sqrt": (0.5, 0), "sgd": (1, 0), "kept": (0, 0), "adamw": (0.5, -0.32)}
MOST_STEPS = 2000
RATE = lb.PlannedRate(1e-3, total=100_000, warmup=10_000, decay="linear")


def loop(starts, total, run, rate, law, tokens):
    """The run as one would write it: a row for each step, counted in examples (or tokens)."""
    seen = 0
    examples = -(-total // tokens) / -(-run.total // tokens)
    while seen < total:
        (batch,) = [batch for start, batch in starts if start <= seen][-1:]
        k = batch / run.batch_size
        power, of_length = POWERS[law]
        factor = k**power * examples**of_length
        decays = {"decoupled": k / examples / factor, "independent": k / examples}
        decays = {} if law == "kept" else decays
        yield (
            seen // tokens,
            batch,
            rate(seen / examples) * factor,
            run.weight_decay * decays.get(run.decay_kind, 1),
        )
        seen += batch * tokens


@st.composite
def plans(draw):
    tokens = draw(st.sampled_from([1, 1, 7, 128]))
    total = draw(st.integers(2, MOST_STEPS)) * tokens
    count = draw(st.integers(0, min(4, total - 1)))
    later = draw(st.lists(st.integers(1, total - 1), min_size=count, max_size=count, unique=True))
    # A multiple of an example's tokens or not: edges may lie inside a batch and inside an example.
    starts = [0, *sorted(later)]
    return tokens, total, [(start, draw(st.integers(1, 400))) for start in starts]


@settings(max_examples=60, deadline=None)
@given(
    drawn=plans(),
    batch_size=st.integers(1, 400),
    times=st.sampled_from([1, 1, 2, 7]),
    law=st.sampled_from(list(POWERS)),
    decay_kind=st.sampled_from(["decoupled", "independent", "l2", "rescaled"]),
    shape=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_a_plain_loop_over_the_run(drawn, batch_size, times, law, decay_kind, shape):
    tokens, total, starts = drawn
    of_run = total * times
    warmup = of_run // 10
    rate = lb.PlannedRate(0.1, warmup=warmup, decay=shape, end_value=0.01)

    def exact(seen):
        if seen < warmup:
            return 0.1 * seen / warmup
        r = min(1, (seen - warmup) / (of_run - warmup))
        left = {"linear": 1 - r, "cosine": (1 + math.cos(math.pi * r)) / 2, "constant": 1.0}
        return 0.01 + 0.09 * left[shape]

    run = tuned(rate, batch_size, of_run, weight_decay=0.3, decay_kind=decay_kind)
    plan = lb.batch_plan(
        starts, total=total, sequence_length=None if tokens == 1 else tokens, run=run, law=law
    )
    rows = list(loop(starts, total, run, exact, law, tokens))
    assert plan.total_steps == len(rows)
    # The examples of all steps add up, and the last step is needed.
    assert sum(batch for _, batch, _, _ in rows) == plan.examples_at(plan.total_steps)
    assert plan.examples_at(plan.total_steps - 1) * tokens < total
    assert plan.examples_at(plan.total_steps) * tokens >= total

    for step, (seen, batch, _, _) in enumerate(rows):
        assert (plan.examples_at(step), plan.batch_size(step)) == (seen, batch)
        assert plan.step_at(seen) == step
        assert plan.step_at(seen + 1) == step + 1
    # Always as many, so that nothing is compiled again.
    steps = jnp.arange(MOST_STEPS, dtype=jnp.int32)
    found = plan.batch_size(steps), plan.learning_rate(steps), plan.weight_decay(steps)
    batches, rates, decays = (values[: len(rows)] for values in found)
    assert_array_equal(batches, [row[1] for row in rows])
    assert_allclose(rates, [row[2] for row in rows], rtol=5e-6, atol=1e-6)
    assert_allclose(decays, [row[3] for row in rows], rtol=1e-6)


def test_calls_of_update():
    plan = lb.batch_plan("0:8 64:16 96:8", total=130, micro_batch_size=2, devices=2)
    micro_batches = plan.micro_batches(jnp.arange(plan.total_steps))
    assert_array_equal(micro_batches, [2] * 8 + [4] * 2 + [2] * 5)
    of_calls = [step for step, count in enumerate(micro_batches) for _ in range(count)]
    assert plan.calls == len(of_calls)
    assert [plan.step_of_call(call) for call in range(plan.calls)] == of_calls
    assert [*map(plan.call_of_step, range(15))] == [*map(of_calls.index, range(15))]
    alone = lb.batch_plan("0:8 64:16", total=130)
    assert alone.calls == alone.total_steps


def test_calls_of_many_stages():
    """The time of an answer does not grow with the square of the stages."""
    starts = [(4 * index, 1 + index % 2) for index in range(4000)]
    plan = lb.batch_plan(starts, total=16_000, micro_batch_size=1)
    before = time.perf_counter()
    assert plan.step_of_call(plan.calls - 1) == plan.total_steps - 1
    assert plan.step_of_call(plan.call_of_step(6001)) == 6001
    assert time.perf_counter() - before < 5  # it was a minute


def test_a_half_life_in_examples():
    plan = lb.batch_plan("0:100 5k:400", total="10k")
    half_life = plan.in_steps(2000)
    assert [float(half_life(step)) for step in (0, 49, 50)] == [20, 20, 5]
    assert float(jax.jit(half_life)(jnp.int32(50))) == 5
    tokens = lb.batch_plan("0:100 5k:400", total="10k", sequence_length=10)
    assert float(tokens.in_steps(2000)(0)) == 2
    with pytest.raises(ValueError, match="examples must be >= 1"):
        plan.in_steps(0)


def test_past_the_end_the_last_values_hold():
    rate = lb.PlannedRate(1e-3, total=10_000, decay="linear", end_value=1e-4)
    plan = lb.batch_plan(
        "0:100 5k:400", total="10k", micro_batch_size=50,
        run=tuned(rate, 100, 10_000, weight_decay=0.1),
    )  # fmt: skip
    assert plan.total_steps == 50 + 13  # 5,200 examples in the second stage
    for step in (63, 2**31 - 1, jnp.int32(63), jnp.int32(2**31 - 1)):
        assert (plan.batch_size(step), plan.micro_batches(step)) == (400, 8)
        assert_allclose((plan.learning_rate(step), plan.weight_decay(step)), (2e-4, 0.2), rtol=1e-6)
    assert plan.examples_at(64) == 10_200 + 400
    # A schedule that goes on is not asked for more than the run has.
    run = tuned(lambda seen: seen, 100, 10_000)
    endless = lb.batch_plan("0:100 5k:400", total="10k", run=run, law="kept")
    assert float(endless.learning_rate(10**6)) == 10_000


def test_counts_beyond_31_bits():
    """Ten trillion tokens, in 32 bits: steps are exact, and rates as good as a float is."""
    assert not jax.config.jax_enable_x64
    tokens = 10**13
    plan = lb.batch_plan(
        {0: 4096, 10**12: 8192, 5 * 10**12: 16384},
        total=tokens,
        sequence_length=4096,
        run=tuned(lb.PlannedRate(1.0, decay="linear"), 4096, tokens),
        law="kept",
    )
    first = -(-(10**12) // (4096 * 4096))
    assert [stage.first_step for stage in plan.stages][1] == first
    for step in (0, first - 1, first, plan.total_steps // 2, plan.total_steps - 1):
        seen = plan.examples_at(step) * 4096
        assert int(plan.batch_size(jnp.int32(step))) == plan.batch_size(step)
        rate = jax.jit(plan.learning_rate)(jnp.int32(step))
        assert rate.dtype == jnp.float32
        assert float(rate) == pytest.approx(1 - seen / tokens, abs=3e-7)
    assert plan.examples_at(plan.total_steps) > 2**31
    assert plan.step_at(tokens="10T") == plan.total_steps
    assert plan.step_at(tokens=10**12) == first


def test_what_is_written():
    plan = lb.batch_plan("0:512 2M:2048 20M:16384", total="1.5B")
    assert [stage.batch_size for stage in plan.stages] == [512, 2048, 16384]
    assert plan == lb.batch_plan([(0, 512), (2_000_000, 2048), (2e7, "16384")], total=1_500_000_000)
    assert plan == lb.batch_plan({0: 512, "2M": 2048, "20000k": 16384}, total="1500M")
    assert plan == lb.batch_plan("0:512, 2m:2048, 20m:16384", total="0.0015T")
    # M is 10^6. The edge lies inside the batch that ends after 2,000,384 examples.
    assert plan.stages[1] == lb.Stage(3907, 2_000_384, 2048)
    assert lb.batch_plan(64, total=6400).total_steps == 100


def test_a_stage_shorter_than_a_batch_has_no_step():
    plan = lb.batch_plan("0:100 10:20 30:50 150:10", total=200)
    assert plan.stages == (lb.Stage(0, 0, 100), lb.Stage(1, 100, 50), lb.Stage(2, 150, 10))


def test_is_plain_data():
    run = tuned(RATE, 64, "100k", weight_decay=0.1)
    plan = lb.batch_plan("0:64 10k:256", total="100k", run=run, devices=8)
    same = lb.batch_plan({0: 64, 10_000: 256}, total=1e5, run=run, devices=8)
    assert plan == same
    assert hash(plan) == hash(same)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert lb.BatchPlan.from_json(plan.to_json()) == plan
    both = dataclasses.replace(plan, run=tuned(RATE, 64, "100k", weight_decay=RATE, b1=0.8))
    assert lb.BatchPlan.from_json(both.to_json()) == both
    assert dataclasses.replace(plan, law="kept") != plan
    assert lb.BatchPlan.from_json(lb.batch_plan(8, total=100).to_json()).run is None


def test_numbers_of_numpy_and_jax_are_data_too():
    rate = lb.PlannedRate(np.float32(1e-3), total=np.int64(2_000_000))
    plan = lb.batch_plan(
        np.int64(64), total="2M", sequence_length=np.int32(8), devices=np.int64(8),
        run=tuned(rate, np.int16(64), jnp.int32(2_000_000), weight_decay=jnp.float32(0.5)),
    )  # fmt: skip
    assert lb.BatchPlan.from_json(plan.to_json()) == plan
    hash(tuned(lb.PlannedRate(jnp.float32(0.5)), 64, "2M"))


def test_a_schedule_that_is_no_data():
    plan = lb.batch_plan(64, total="2M", run=tuned(lambda seen: 0.1, 64, "2M"))
    with pytest.raises(TypeError, match=r"the schedule .* cannot be written as JSON"):
        plan.to_json()


def test_a_plan_that_is_changed_is_checked():
    plan = lb.batch_plan("0:512 1M:2048", total="2M", micro_batch_size=256)
    with pytest.raises(ValueError, match=r"300 x 1 = 300, got 512. Take 300 or 600"):
        dataclasses.replace(plan, micro_batch_size=300)
    with pytest.raises(TypeError, match="run must be a TunedRun or None"):
        dataclasses.replace(plan, run=0.1)
    with pytest.raises(ValueError, match="law must be one of"):
        dataclasses.replace(plan, run=tuned(0.1, 8, 100), law="x")


def test_a_planned_rate_takes_the_total_of_the_run():
    run = tuned(lb.PlannedRate(1e-3, warmup="1k"), 64, "2M")
    assert run.learning_rate == lb.PlannedRate(1e-3, total="2M", warmup="1k")
    with pytest.raises(ValueError, match="total must be given to PlannedRate"):
        lb.PlannedRate(1e-3)(5)
    for warmup in (100, 101):
        with pytest.raises(ValueError, match=r"warmup \+ hold must be less than total, 100"):
            lb.PlannedRate(1e-3, total=100, warmup=warmup)


def test_a_schedule_of_integers_beyond_31_bits():
    def rate(schedule):
        run = tuned(schedule, 512, 10**13)
        return lb.batch_plan(512, total=10**13, sequence_length=4096, run=run).learning_rate(0)

    for schedule in (
        optax.linear_schedule(1e-3, 0.0, 10**13),
        optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10**11, 10**13),
    ):
        with pytest.raises(ValueError, match="Give its lengths as floats, such as 1e13"):
            rate(schedule)
    assert rate(optax.linear_schedule(1.0, 0.0, 1e13)) == 1


def test_the_table_says_that_a_schedule_counts_steps():
    run = tuned(optax.cosine_decay_schedule(1e-3, 2442), 512, "2M")
    plan = lb.batch_plan("0:512 1M:2048", total="2M", run=run)
    assert "It is 0 from about step" in str(plan)
    assert "It is 0" not in str(dataclasses.replace(plan, run=tuned(0.1, 512, "2M")))


def test_is_printed_while_a_program_is_traced():
    plan = lb.batch_plan("0:8 50:16", total=100, run=tuned(RATE, 8, 100_000))
    said = []
    jax.eval_shape(lambda: said.append(str(plan)))
    assert said == [str(plan)]


WRONG = {
    "no beginning": (("5:512", 100), ValueError, "begin with a batch size for 0"),
    "not in order": (("0:512 20:64 10:32", 100), ValueError, "got 10 after 20"),
    "no colon": (("0:512 20", 100), ValueError, "'seen:batch_size'"),
    "two colons": (("0:512:3", 100), ValueError, "'seen:batch_size'"),
    "a unit that is none": (("0:512 2X:64", 100), ValueError, "'2X'"),
    "a fraction of an example": (("0:512 0.5:64", 100), ValueError, "whole number"),
    "no batch": (("0:0", 100), ValueError, ">= 1"),
    "after the end": (("0:8 200:16", 100), ValueError, "begins at 200"),
    "empty": (([], 100), ValueError, "begin with a batch size for 0"),
    "something else": ((3.5, 100), TypeError, "got 3.5"),
    "no total": (("0:8", 0), ValueError, "total must be >= 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(name):
    (stages, total), error, words = WRONG[name]
    with pytest.raises(error, match=words):
        lb.batch_plan(stages, total=total)


def test_a_batch_that_is_not_divided():
    with pytest.raises(ValueError, match=r"48 x 8 = 384, got 2000. Take 1920 or 2304"):
        lb.batch_plan("0:768 10k:2000", total=20_000, micro_batch_size=48, devices=8)
    with pytest.raises(ValueError, match=r"64 x 8 = 512, got 100. Take 512"):
        lb.batch_plan(100, total=20_000, micro_batch_size=64, devices=8)
    with pytest.raises(ValueError, match=r"1 x 8 = 8, got 100"):
        lb.batch_plan(100, total=20_000, devices=8)


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "b1", "micro_batches"])
def test_what_the_plan_was_not_given(name):
    with pytest.raises(ValueError, match="must be given to batch_plan"):
        getattr(lb.batch_plan(8, total=100), name)(0)


def test_a_number_that_the_optimizer_does_not_have():
    with pytest.raises(ValueError, match="adamw has no momentum: it has b1, b2, eps"):
        lb.batch_plan(8, total=100, run=tuned(0.1, 8, 100)).momentum(0)
