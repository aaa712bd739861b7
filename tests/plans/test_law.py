"""The rows of the law by numbers worked out by hand, and plans against them."""

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS, Power
from optax_largebatch.plans.tuned_run import FAMILIES

NUMBERS = {"momentum": 0.95, "b1": 0.9, "b2": 0.999, "eps": 1e-8}


def tuned(optimizer="adamw", batch_size=256, total=4_096_000, **changes):
    known = {name: NUMBERS[name] for name in FAMILIES[optimizer][1]}
    rate = lb.PlannedRate(1e-3, warmup=256_000)
    numbers = {"learning_rate": rate, "weight_decay": 0.1} | known | changes
    return lb.TunedRun(optimizer, batch_size=batch_size, total=total, **numbers)


def moved(run, batch, law=None, times=1):
    """The numbers of a constant batch, in a run `times` as long."""
    plan = lb.batch_plan(batch, total=times * run.total, run=run, law=law)
    factors = {"learning_rate": run.peak, "weight_decay": run.weight_decay}
    return {name: after.value * factors.get(name, 1) for name, after in plan.moved(batch).items()}


# From 256 to 1024, k = 4: what each row changes. The rest stays.
OURS = {"learning_rate": 2e-3, "weight_decay": 0.2, "b1": 0.7, "b2": 0.996005996, "eps": 5e-9}
EXPECTED = {
    "adamw": OURS,
    "muon": OURS | {"momentum": 0.8},
    "muonh": OURS | {"momentum": 0.8, "weight_decay": 0.1},
    "adamh": OURS | {"weight_decay": 0.1},
    "lamb": OURS | {"weight_decay": 0.1},
    "lans": OURS | {"weight_decay": 0.1},
    "lars": {"learning_rate": 2e-3},
    "sgd": {"learning_rate": 4e-3},
}
OF_ADAMW = {
    "sqrt": {"learning_rate": 2e-3, "weight_decay": 0.2},
    "kept": {},
    "adam_sde": {"learning_rate": 2e-3, "weight_decay": 0.2, "b1": 0.6, "b2": 0.996, "eps": 5e-9},
    "legew": {"learning_rate": 2e-3, "weight_decay": 0.2},
    "token_half_life": {"weight_decay": 0.4, "b2": 0.996005996},
    "marin": {"learning_rate": 2e-3, "weight_decay": 0.2, "b2": 0.996005996, "eps": 5e-9},
}
START = {"learning_rate": 1e-3, "weight_decay": 0.1}


@pytest.mark.parametrize("optimizer", FAMILIES)
def test_the_row_of_each_optimizer(optimizer):
    run = tuned(optimizer)
    assert moved(run, 1024) == pytest.approx(START | run.numbers | EXPECTED[optimizer], rel=1e-8)


@pytest.mark.parametrize("law", OF_ADAMW)
def test_the_rows_of_others(law):
    run = tuned()
    expected = START | run.numbers | OF_ADAMW[law]
    assert moved(run, 1024, law) == pytest.approx(expected, rel=1e-8)


def test_every_row_has_numbers_here():
    assert set(LAWS) == set(EXPECTED) | set(OF_ADAMW)


@pytest.mark.parametrize(
    ("optimizer", "highest"), [("adamw", 0.08), ("lamb", 0.07), ("lans", 0.1), ("muon", 0.15)]
)
def test_warns_of_a_rate_at_which_the_law_failed(optimizer, highest):
    """From 256 to 1024 the rate doubles; MuonH's failed nowhere."""
    for times, name, warns in [(0.49, optimizer, 0), (0.51, optimizer, 1), (0.51, "muonh", 0)]:
        run = tuned(name, learning_rate=times * highest)
        text = " ".join(str(lb.batch_plan(1024, total=run.total, run=run)).split())
        assert text.count(f"a rate above {highest} lost to a search") == warns


def test_the_length_of_the_run():
    """Four times the batch and nine times the examples."""
    run = tuned(b1=0.98)
    rate = 2e-3 * 9**-0.32
    # The timescale of the decay stays the same part of the run: B / (rate decay examples).
    expected = {"learning_rate": rate, "weight_decay": 1e-4 * 4 / 9 / rate, "b2": 0.999**4}
    expected |= {"b1": 1 - 0.02 * 4 / 3, "eps": 1e-8 * 9**0.5 / 4**0.5}
    assert moved(run, 1024, times=9) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("decoupled", 0.2), ("independent", 0.4), ("l2", 0.1), ("rescaled", 0.1)],
)
def test_decay_moves_by_its_kind(kind, expected):
    assert moved(tuned(decay_kind=kind), 1024)["weight_decay"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("b1", "b2", "batch", "expected"),
    [(0.9, 0.999, 8192, (0.7, 0.999**32)), (0.6, 0.94, 8192, (0.6, 0.94)),
     (0.95, 0.999, 1 << 20, (0.7, 0.95)), (0.995, 0.99999, 64, (0.995, 0.99999)),
     (0.9, 0.999, 8, (0.99, 0.9999)), (0.9, 0.999, 256, (0.9, 0.999)),
     (0.0, 0.9, 255, (1 / 256, 0.9 ** (255 / 256))), (0.62, 0.9, 64, (0.905, 0.9**0.25)),
     (0.0, 0.9, 1, (0.99, 0.9 ** (1 / 256))), (0.9975, 0.99999, 1 << 20, (0.7, 0.99999**4096)),
     (0.9975, 0.99999, 257, (0.997490234375, 0.99999 ** (257 / 256)))],
)  # fmt: skip
def test_bounds(b1, b2, batch, expected):
    """They stop what moves, and from beyond them the law leads back without a jump."""
    after = moved(tuned(b1=b1, b2=b2), batch)
    assert (after["b1"], after["b2"]) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    law=st.sampled_from(sorted(LAWS)),
    old=st.floats(0, 1, exclude_max=True),
    k=st.floats(0.01, 100),
    r=st.floats(0.1, 10),
)
def test_no_number_goes_further_than_its_law(law, old, k, r):
    """A bound shortens the way of a number, and turns none around."""
    row = LAWS[law]
    names = ("momentum", "b1", "b2")
    after = row.moved(dict.fromkeys(names, old), "decoupled", k, r)
    for name in names:
        power = row.b2 if name == "b2" else row.momentum
        alone = old**k if power == "half-life" else 1 - (1 - old) * power.factor(k, r)
        assert min(old, alone) - 1e-12 <= after[name].value <= max(old, alone) + 1e-12


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    optimizer=st.sampled_from(sorted(FAMILIES)),
    law=st.sampled_from([None, *sorted(LAWS.keys() - {"legew"})]),  # which may refuse
    old=st.integers(1, 2**16),
    batches=st.lists(st.integers(1, 2**16), min_size=1, max_size=3),
    times=st.floats(0.02, 50),
)
def test_a_stage_has_the_numbers_of_a_constant_batch(optimizer, law, old, batches, times):
    """A plan of one stage is the law at that batch, and a ramp is it stage by stage."""
    run = tuned(optimizer, batch_size=old, total=2**24)
    total = round(2**24 * times)
    edge = total // (2 * len(batches))
    ramp = lb.batch_plan(
        [(i * edge, batch) for i, batch in enumerate(batches)], total=total, run=run, law=law
    )
    assert max(map(len, str(ramp).splitlines())) <= 80
    for stage in ramp.stages:
        one = lb.batch_plan(stage.batch_size, total=total, run=run, law=law)
        assert one.moved(stage.batch_size) == ramp.moved(stage.batch_size)
        for name in run.numbers.keys() - {"eps"}:
            expected = ramp.moved(stage.batch_size)[name].value
            assert float(getattr(ramp, name)(stage.first_step)) == pytest.approx(expected)
        factor = one.moved(stage.batch_size)["weight_decay"].value
        assert float(ramp.weight_decay(stage.first_step)) == pytest.approx(0.1 * factor)
    if "eps" in run.numbers:
        assert ramp.eps == ramp.moved(ramp.stages[-1].batch_size)["eps"].value


@pytest.mark.parametrize("tokens", [1, 16])
def test_legew_keeps_the_steps_of_the_warm_up(tokens):
    total = 4_096_000 * tokens
    run = tuned("lamb", total=total, learning_rate=lb.PlannedRate(1e-3, warmup=total // 16))
    by_legew = {"total": total, "sequence_length": tokens, "law": "legew"}
    plan = lb.batch_plan(1024, run=run, **by_legew)
    rates = [float(plan.learning_rate(step)) for step in (500, 1000, 1100)]
    assert rates[:2] == pytest.approx([1e-3, 2e-3], rel=1e-5)
    assert rates[2] < 2e-3
    with pytest.raises(ValueError, match=r"legew keeps the 1000 steps .* the run has 250 of 16384"):
        lb.batch_plan(16384, run=run, **by_legew)
    with pytest.raises(ValueError, match="learning_rate must be a PlannedRate for 'legew'"):
        lb.batch_plan(1024, run=tuned("lamb", learning_rate=lambda seen: seen), **by_legew)


def test_warmup_stable_decay():
    """The hold is the same part of the run, in examples, at every batch size."""
    rate = lb.PlannedRate(1e-3, warmup="100k", hold="700k", decay="linear")
    run = tuned(total="1M", learning_rate=rate)
    assert "0.001, warm-up 100k, hold 700k, then linear to 0" in str(run)
    plan = lb.batch_plan("0:1000 500k:2000", total="2M", run=run, law="sqrt")

    def at(seen):
        return float(plan.learning_rate(plan.step_at(seen)))

    peak = 1e-3 * math.sqrt(2000 / 256)
    for seen, share in [(500_000, 1), (1_000_000, 1), (1_600_000, 1), (1_800_000, 0.5)]:
        assert at(seen) == pytest.approx(share * peak, rel=1e-4)
    assert at(100_000) == pytest.approx(0.5e-3 * math.sqrt(1000 / 256), rel=1e-4)
    assert lb.BatchPlan.from_json(plan.to_json()) == plan


class TestTo:
    def test_muonh_has_the_angle_of_adamw(self):
        run = tuned(total="51.2M", decay_kind="decoupled").to("muonh")
        assert run.peak == pytest.approx(math.sqrt(1e-3 * 0.1))
        assert run.learning_rate.warmup == 256_000
        assert (run.weight_decay, run.b1, run.b2, run.momentum) == (0.0, 0.9, 0.999, None)
        assert "sqrt(rate x decay)" in str(run)
        assert "Adam moves the rest at 0.231 of it, without decay (adamw had 0.001)" in run.note
        assert "Do not trust" not in str(run)

    @pytest.mark.parametrize(("rate", "decay", "said"), [(1e-3, 3.0, "13"), (0.1, 1e-3, "0.023")])
    def test_a_rate_of_the_rest_far_from_that_of_adamw(self, rate, decay, said):
        run = tuned(total="51.2M", learning_rate=rate, weight_decay=decay, decay_kind="decoupled")
        assert f"That is {said} times as much. In small networks" in run.to("muonh").note
        near = dataclasses.replace(run, weight_decay=100 * rate)
        assert "times as much" not in near.to("muonh").note

    def test_a_decay_that_has_no_time_to_settle(self):
        short = tuned(total=51_200, learning_rate=1e-3)
        assert "Do not trust it" in str(short.to("muonh"))
        assert "At 256, search from 0.071 to 0.28." in short.to("muonh").note
        settles = dataclasses.replace(short, weight_decay=1.5 * 256 / 51_200 / 1e-3)
        assert "Do not trust it" not in str(settles.to("muonh"))
        with pytest.raises(dataclasses.FrozenInstanceError):
            short.batch_size = 1

    def test_the_end_of_the_rate_follows(self):
        rate = lb.PlannedRate(1e-3, end_value=1e-4)
        run = tuned(learning_rate=rate).to("muonh")
        assert run.learning_rate.end_value == pytest.approx(run.peak / 10)
        assert tuned(learning_rate=1e-3).to("muonh").learning_rate == pytest.approx(0.01)

    def test_tokens_are_not_examples(self):
        """128 steps of 8 examples with 1024 tokens, not 131 thousand."""
        run = tuned(batch_size=8, total=128 * 8 * 1024, learning_rate=1e-3)
        assert "Do not trust" not in str(run.to("muonh"))
        assert "Do not trust" in str(run.to("muonh", sequence_length=1024))
        with pytest.raises(ValueError, match="sequence_length must be >= 1"):
            run.to("muonh", sequence_length=0)

    def test_muon_keeps_rate_and_decay(self):
        run = tuned()
        assert dataclasses.replace(run.to("muon"), optimizer="adamw", note="") == run
        assert run.to("adamw") is run

    @pytest.mark.parametrize(
        "changes",
        [{"weight_decay": 0.0}, {"decay_kind": "independent"}, {"learning_rate": lambda x: x}],
    )
    def test_what_gives_no_angle(self, changes):
        with pytest.raises(ValueError, match=r"for the rate of muonh, sqrt\(rate x decay\)"):
            tuned(**changes).to("muonh")

    def test_nobody_knows_the_rest(self):
        with pytest.raises(ValueError, match="optimizer must be 'adamw', or one of muon, muonh"):
            tuned().to("lamb")
        with pytest.raises(ValueError, match="optimizer must be 'lamb'"):
            tuned("lamb").to("muonh")


class TestTunedRun:
    def test_says_what_is_assumed(self):
        text = str(lb.TunedRun("lans", batch_size=64, total="1M", learning_rate=0.1, b1=0.8))
        assert "b1             0.8\n" in text
        assert "b2             0.999 (assumed)" in text
        assert "0.1, constant" in text

    def test_refuses_a_number_that_the_optimizer_does_not_have(self):
        with pytest.raises(ValueError, match="momentum must be None for 'adamw', which has b1, b2"):
            tuned(momentum=0.9)


def test_the_printed_plan_is_compared_with_the_run_that_was_tuned():
    """Not with a run at its batch that is as long as the plan."""
    run = lb.TunedRun(
        "adamw", batch_size=256, total="4M", learning_rate=tuned().learning_rate, b1=0.9
    )
    text = str(lb.batch_plan(1024, total="8M", run=run))
    assert "7813 steps for 8M examples; the tuned run at 256 takes 15625." in text
    assert "warm-up        256k -> 512k" in text
    held = dataclasses.replace(run, learning_rate=lb.PlannedRate(1e-3, warmup="256k", hold="2M"))
    assert "  hold           2M -> 4M " in str(lb.batch_plan(1024, total="8M", run=held))
    assert "Assumed: b2, eps." in text
    for stays in ({"total": "8M", "law": "legew"}, {"total": "4M"}):  # in steps; in examples
        assert "warm-up" not in str(lb.batch_plan(1024, run=run, **stays))


def test_four_rates_around_the_plan():
    plan = lb.batch_plan("0:256 1M:4096", total=4_096_000, run=tuned())
    assert plan.rates == pytest.approx((1e-3, 2e-3, 4e-3, 8e-3))
    assert "try the peaks 0.001, 0.002, 0.004 (the plan's), 0.008." in str(plan)
    half = plan.with_peak(plan.rates[1])
    for step in (1000, plan.total_steps - 100):
        assert float(half.learning_rate(step)) == pytest.approx(
            0.5 * float(plan.learning_rate(step)), rel=1e-5
        )
    assert half.rates[2] == pytest.approx(2e-3)
    with pytest.raises(ValueError, match="whose peak is known"):  # the schedule would be lost
        tuned(learning_rate=lambda seen: seen).with_peak(0.1)
    with pytest.raises(ValueError, match="whose peak is known"):
        lb.batch_plan(8, total=100, run=tuned(learning_rate=lambda seen: seen)).rates  # noqa: B018


@pytest.mark.parametrize(
    ("power", "r", "words"),
    [(Power(), 2, "kept"), (Power(1), 2, "times k"), (Power(0.25), 2, "times k^0.25"),
     (Power(0.5, -0.32), 2, "times sqrt(k) r^-0.32"), (Power(0.5, -0.32), 1, "times sqrt(k)")],
)  # fmt: skip
def test_powers_in_words(power, r, words):
    assert power.words(r) == words


def test_a_batch_size_for_the_length_of_a_run():
    assert lb.scale_batch_size(512, run_length=1) == 512
    assert lb.scale_batch_size(512, run_length=8) == round(512 * 8**0.383)
    assert lb.scale_batch_size(512, run_length=4, power=0.5) == 1024
    assert lb.scale_batch_size(1, run_length=1e-9) == 1


@pytest.mark.parametrize(
    ("batch_size", "run_length", "power"),
    [
        (512, 1e38, 9.0),
        (512, 1e-300, -5.0),
        (2, 2.0, 62.0),
        pytest.param(10**400, 1, 0.5, id="no float"),
    ],
)
def test_a_batch_size_that_no_run_has(batch_size, run_length, power):
    with pytest.raises(ValueError, match=r"^batch_size, run_length and power must give .* at most"):
        lb.scale_batch_size(batch_size, run_length=run_length, power=power)
    assert lb.scale_batch_size(2, run_length=2.0, power=61.0) == 2**62
