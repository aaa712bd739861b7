"""Each rule of scaling with numbers worked out by hand, and where each ends."""

import dataclasses
import math
import re

from hypothesis import assume, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.catalogue import published, rows
from optax_largebatch.recipes.scaling_rules import B1_FLOOR, RULES

ADAMW = lb.Hyperparameters(
    learning_rate=1e-3,
    weight_decay=0.1,
    momentum=0.95,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    warmup_steps=1000,
    total_steps=16000,
)

# From 256 to 1024, k = 4: what each rule changes. The rest stays.
SHORTER = {"warmup_steps": 250, "total_steps": 4000}
HALF_LIFE = {"b2": 0.996005996001}
EXPECTED = {
    "linear": SHORTER | {"learning_rate": 4e-3},
    "sqrt": SHORTER | {"learning_rate": 2e-3, "weight_decay": 0.2},
    "adam_sde": SHORTER
    | {"learning_rate": 2e-3, "weight_decay": 0.2, "b1": 0.6, "b2": 0.996, "eps": 5e-9},
    "token_half_life": SHORTER | HALF_LIFE | {"weight_decay": 0.4},
    "legew": {"learning_rate": 2e-3, "total_steps": 4000},
    "muon": SHORTER | HALF_LIFE | {"learning_rate": 2e-3, "weight_decay": 0.2, "eps": 5e-9},
    "hyperball": SHORTER | HALF_LIFE | {"learning_rate": 2e-3, "eps": 5e-9},
}

# For 32 times the batch, what a usable result is: rate, weight decay, b1, b2 from .95 and .999.
AT_32 = {
    "linear": (32e-3, 0.1, 0.9, 0.95, 0.999),
    "sqrt": (5.657e-3, 0.5657, 0.9, 0.95, 0.999),
    "adam_sde": (5.657e-3, 0.5657, 0.6, 0.95, 0.968),
    "token_half_life": (1e-3, 3.2, 0.9, 0.95, 0.9685),
    "legew": (5.657e-3, 0.1, 0.9, 0.95, 0.999),
    "muon": (5.657e-3, 0.5657, 0.9, 0.95, 0.9685),
    "hyperball": (5.657e-3, 0.1, 0.9, 0.95, 0.9685),
}

every_rule = pytest.mark.parametrize("rule", RULES)


def result(rule, from_batch=256, to_batch=1024, settings=ADAMW, **options):
    return lb.scale_hyperparameters(
        settings, from_batch=from_batch, to_batch=to_batch, rule=rule, **options
    )


def scaled(*arguments, **options):
    return result(*arguments, **options).settings


def account(*arguments, **options):
    """The account on one line."""
    return " ".join(result(*arguments, **options).account.split())


def reasons(*arguments, **options):
    """The lines of the table, by hyperparameter."""
    lines = str(result(*arguments, **options)).splitlines()
    return {line.split()[0]: line for line in lines if line.startswith("  ")}


def numbers(settings):
    return {name: x for name, x in dataclasses.asdict(settings).items() if x is not None}


@every_rule
def test_worked_numbers(rule):
    expected = numbers(ADAMW) | EXPECTED[rule]
    assert numbers(scaled(rule)) == pytest.approx(expected, rel=1e-12)


@every_rule
def test_there_and_back(rule):
    back = scaled(rule, 1024, 256, scaled(rule))
    assert numbers(back) == pytest.approx(numbers(ADAMW), rel=1e-9)


@every_rule
def test_32_times_the_batch_is_usable(rule):
    long = dataclasses.replace(ADAMW, total_steps=100_000)
    for at, b2 in enumerate((0.95, 0.999)):
        new = scaled(rule, 256, 8192, dataclasses.replace(long, b2=b2))
        rate, decay, b1, *expected = AT_32[rule]
        found = (new.learning_rate, new.weight_decay, new.b1, new.b2)
        assert found == pytest.approx((rate, decay, b1, expected[at]), rel=1e-3)


@every_rule
def test_the_account_says_what_changed_and_why(rule):
    lines = reasons(rule)
    assert set(lines) == set(numbers(ADAMW))
    for name, line in lines.items():
        assert ("->" in line) == (name in EXPECTED[rule])
        assert ("(kept)" in line) == (name not in EXPECTED[rule])
        assert len(line.split("  ")[-1]) > 5  # the reason comes last
    assert account(rule).startswith(f"{rule}, batch size 256 to 1024 (k = 4):")


@every_rule
def test_a_warmup_does_not_vanish(rule):
    short = dataclasses.replace(ADAMW, warmup_steps=10)
    assert scaled(rule, 256, 8192, short).warmup_steps == (10 if rule == "legew" else 1)
    none = dataclasses.replace(ADAMW, warmup_steps=0)
    assert scaled(rule, 256, 8192, none).warmup_steps == 0


def test_takes_numbers_of_jax_and_numpy():
    """The result has the numbers of Python."""
    options = {"run_length": 2.0, "length_power": -0.5, "b2_floor": 0.5, "b2_ceiling": 0.999}
    python = result("muon", **options)
    for kind in (jnp.float32, np.float32):
        given_as = {name: kind(value) for name, value in options.items()}
        start = dataclasses.replace(ADAMW, learning_rate=kind(1e-3), total_steps=np.int64(16000))
        other = result("muon", np.int64(256), np.int32(1024), start, **given_as)
        assert numbers(other.settings) == pytest.approx(numbers(python.settings), rel=1e-6)
        assert {type(x) for x in numbers(other.settings).values()} == {int, float}
        assert other.account == python.account
        assert lb.scale_batch_size(512, run_length=kind(8), power=kind(0.5)) == 1448
    assert scaled("muon", run_length=2) == scaled("muon", run_length=2.0)


def test_token_half_life_is_the_same_in_tokens():
    """The weight of a gradient halves after as many examples as before."""
    new = scaled("token_half_life", 256, 8192)
    halves = [math.log(0.5) / math.log(b2) * batch for b2, batch in ((0.999, 256), (new.b2, 8192))]
    np.testing.assert_allclose(*halves, rtol=1e-9)


def test_the_account_shows_all_digits_of_a_number_of_steps():
    long = lb.Hyperparameters(learning_rate=0.1, total_steps=1_234_567)
    assert "1234567 -> 617284" in account("sqrt", 256, 512, long)


def test_what_is_not_there_is_not_scaled():
    new = result("linear", 256, 512, lb.Hyperparameters(learning_rate=0.1))
    assert new.settings == lb.Hyperparameters(learning_rate=0.2)
    assert "total_steps" not in new.account
    assert "decay_kind" not in new.account


class TestWeightDecay:
    @pytest.mark.parametrize("rule", ["sqrt", "adam_sde", "token_half_life", "muon"])
    @pytest.mark.parametrize("run_length", [0.25, 1.0, 3.0])
    def test_decoupled_keeps_its_timescale(self, rule, run_length):
        """B / (rate decay D) of arXiv 2405.13698, with D the examples of the run."""
        new = scaled(rule, 256, 2048, run_length=run_length, length_power=-0.5)
        timescales = [
            batch / (of.learning_rate * of.weight_decay * examples)
            for of, batch, examples in ((ADAMW, 256, 1.0), (new, 2048, run_length))
        ]
        np.testing.assert_allclose(*timescales, rtol=1e-12)

    @every_rule
    @pytest.mark.parametrize(
        ("kind", "reason"), [("l2", "L2 decay is part of the loss"), ("rescaled", "norms rescale")]
    )
    def test_others_are_kept(self, rule, kind, reason):
        run = {"rule": rule, "to_batch": 2048, "decay_kind": kind, "run_length": 2}
        assert scaled(**run).weight_decay == 0.1
        assert reason in reasons(**run)["weight_decay"]
        assert "Assumes" not in account(**run)

    @pytest.mark.parametrize("rule", ["sqrt", "adam_sde", "token_half_life", "muon"])
    @pytest.mark.parametrize("run_length", [0.25, 1.0, 3.0])
    @pytest.mark.parametrize("to_batch", [64, 8192])
    def test_shrinks_the_parameters_as_before(self, rule, run_length, to_batch):
        """By both update rules, and the independent one as the decoupled one that it stands for."""
        start = dataclasses.replace(ADAMW, weight_decay=1e-4, total_steps=128_000)
        same = dataclasses.replace(start, weight_decay=1e-4 / start.learning_rate)
        options = {"run_length": run_length, "length_power": -0.5}
        new = scaled(rule, 256, to_batch, start, decay_kind="independent", **options)
        new_same = scaled(rule, 256, to_batch, same, decay_kind="decoupled", **options)
        assert new.weight_decay == pytest.approx(new_same.weight_decay * new_same.learning_rate)

        before, after = shrunk(start, independent=True), shrunk(new, independent=True)
        np.testing.assert_allclose(after, before, rtol=0.02)
        np.testing.assert_allclose(shrunk(same), before, rtol=1e-9)
        np.testing.assert_allclose(shrunk(new_same), after, rtol=1e-9)

    def test_an_independent_one_at_32_times_the_batch(self):
        start = dataclasses.replace(ADAMW, weight_decay=1e-4)
        options = {"decay_kind": "independent", "noise_scale": 2048}
        line = reasons("sqrt", 256, 8192, start, **options)["weight_decay"]
        assert "0.0001 -> 0.0032 " in line
        assert line.endswith("keeps B / (decay examples)")
        # Another rate needs no other decay.
        assert "with it, weight_decay" not in account("sqrt", 256, 8192, start, **options)
        assert scaled("sqrt", 256, 8192, start).weight_decay == pytest.approx(32**0.5 * 1e-4)

    @pytest.mark.parametrize(
        ("rule", "assumed"),
        [("linear", "l2"), ("sqrt", "decoupled"), ("legew", "rescaled"), ("muon", "decoupled"),
         ("hyperball", "rescaled")],
    )  # fmt: skip
    def test_the_account_says_what_it_assumes(self, rule, assumed):
        assert f"Assumes decay_kind={assumed!r}." in account(rule, 256, 512)


def shrunk(run, independent=False):
    """The logarithm of what is left of a parameter without gradients, after the whole run."""
    steps = np.arange(run.total_steps)
    shape = np.minimum((steps + 1) / run.warmup_steps, 1 - steps / run.total_steps)
    factor = run.weight_decay if independent else run.learning_rate * run.weight_decay
    return np.log1p(-factor * shape).sum()


class TestBounds:
    @pytest.mark.parametrize("rule", ["adam_sde", "token_half_life", "muon", "hyperball"])
    def test_stop_b2(self, rule):
        slow = dataclasses.replace(ADAMW, b2=0.999)
        assert scaled(rule, 256, 256 * 100, slow).b2 == 0.95
        assert scaled(rule, 256, 256 * 100, slow, b2_floor=0.97).b2 == 0.97
        assert scaled(rule, 256, 8, slow).b2 == 0.9999
        assert scaled(rule, 256, 8, slow, b2_ceiling=0.9995).b2 == 0.9995

    def test_do_not_hold_what_was_outside(self):
        """It moves towards them as the rule says, and no further away."""
        low, high = (dataclasses.replace(ADAMW, b2=b2) for b2 in (0.9, 0.99999))
        assert scaled("token_half_life", 256, 512, low).b2 == 0.9
        assert scaled("token_half_life", 256, 128, low).b2 == pytest.approx(0.9**0.5)
        assert scaled("token_half_life", 256, 128, high).b2 == 0.99999
        assert scaled("token_half_life", 256, 512, high).b2 == pytest.approx(0.99999**2)

    @pytest.mark.parametrize(
        ("rule", "to_batch", "changes", "name", "value", "bound"),
        [
            ("adam_sde", 25600, {}, "b1", "0.9 -> 0.6", "floor 0.6"),
            ("adam_sde", 25600, {}, "b2", "0.999 -> 0.95", "floor 0.95"),
            ("muon", 8, {}, "b2", "0.999 -> 0.9999", "ceiling 0.9999"),
            ("adam_sde", 512, {"b1": 0.5}, "b1", "0.5 (kept)", "floor 0.6"),
            ("adam_sde", 512, {"b2": 0.95}, "b2", "0.95 (kept)", "floor 0.95"),
            ("muon", 128, {"b2": 0.99999}, "b2", "0.99999 (kept)", "ceiling 0.9999"),
            ("adam_sde", 1024, {}, "b1", "0.9 -> 0.6", "(1 - b1) times k"),
            ("adam_sde", 1025, {}, "b1", "0.9 -> 0.6", "floor 0.6"),
        ],
    )
    def test_are_said(self, rule, to_batch, changes, name, value, bound):
        """Also those that keep what was outside."""
        line = reasons(rule, 256, to_batch, dataclasses.replace(ADAMW, **changes))[name]
        assert value in line
        assert line.endswith(bound)

    def test_of_b1_is_no_higher_than_published_values(self):
        runs = [row for entry in published().values() for row in rows(entry)]
        least = min(row["b1"] for row in runs if "b1" in row and row.get("batch_size", 0) >= 1024)
        assert B1_FLOOR <= least <= B1_FLOOR + 0.05

    def test_b1_of_adam_sde_has_no_ceiling(self):
        assert scaled("adam_sde", 2048, 64).b1 == pytest.approx(0.996875)


class TestRunLength:
    @every_rule
    def test_lengths_follow(self, rule):
        longer = scaled(rule, run_length=3)
        assert longer.total_steps == 12_000
        assert longer.warmup_steps == (1000 if rule == "legew" else 750)
        assert "(k = 4), examples times r = 3:" in account(rule, run_length=3)

    @every_rule
    def test_the_rate_follows_by_a_power(self, rule):
        same = scaled(rule).learning_rate
        power = {"hyperball": -0.32}.get(rule, 0.0)
        assert scaled(rule, run_length=3).learning_rate == pytest.approx(same * 3**power)
        fitted = scaled(rule, run_length=3, length_power=-0.395)
        assert fitted.learning_rate == pytest.approx(same * 3**-0.395)

    def test_eps_follows_the_root_of_the_steps(self):
        assert scaled("hyperball", run_length=9).eps == pytest.approx(1e-8 * math.sqrt(9 / 4))
        assert scaled("adam_sde", run_length=9).eps == pytest.approx(1e-8 / 2)


class TestNoiseScale:
    @pytest.mark.parametrize(
        ("rule", "from_batch", "to_batch", "noise", "times", "level"),
        [
            # 1e-3 sqrt((1 + 2048 / 256) / (1 + 2048 / 8192)) = 1e-3 sqrt(9 / 1.25)
            ("sqrt", 256, 8192, 2048, "8192 is 4 times the noise scale of 2048",
             "(1 + 2048 / B)^-0.5 would be 0.00268; with it, weight_decay 1.19."),
            # 1e-3 (1 + 2048 / 256) / (1 + 2048 / 8192) = 1e-3 9 / 1.25
            ("linear", 256, 8192, 2048, "8192 is 4 times",
             "(1 + 2048 / B)^-1 would be 0.0072."),
            # 1e-3 sqrt((1 + 1000 / 8192) / (1 + 1000 / 4096)); the rule says 0.000707
            ("sqrt", 8192, 4096, 1000, "8192 is 8.19 times",
             "would be 0.00095; with it, weight_decay 0.0526."),
            ("sqrt", 4096, 512, 1000, "4096 is 4.1 times", "would be 0.000649;"),
        ],
    )  # fmt: skip
    def test_says_where_noise_does_not_dominate(
        self, rule, from_batch, to_batch, noise, times, level
    ):
        said = account(rule, from_batch, to_batch, noise_scale=noise)
        assert f"Noise does not dominate: {times}" in said
        assert level in said

    @pytest.mark.parametrize("rule", ["linear", "sqrt", "muon"])
    @pytest.mark.parametrize("to_batch", [2048, 8192])
    @pytest.mark.parametrize("run_length", [1.0, 4.0])
    def test_the_decay_that_goes_with_the_levelled_rate(self, rule, to_batch, run_length):
        options = {"decay_kind": "decoupled", "noise_scale": 1024, "run_length": run_length}
        said = account(rule, 4096, to_batch, **options)
        level, decay = re.findall(r"would be (\S+); with it, weight_decay (\S+)\.$", said)[0]
        timescale = to_batch / (float(level) * float(decay) * run_length)
        assert timescale == pytest.approx(4096 / (1e-3 * 0.1), rel=0.01)

    @pytest.mark.parametrize(
        ("decay", "kind"), [(0.1, "l2"), (0.1, "rescaled"), (None, "decoupled"), (0.0, None)]
    )
    def test_other_decays_stay_with_the_levelled_rate(self, decay, kind):
        start = dataclasses.replace(ADAMW, weight_decay=decay)
        said = account("sqrt", 256, 8192, start, noise_scale=2048, decay_kind=kind)
        assert said.endswith("would be 0.00268.")

    @pytest.mark.parametrize(("rule", "to_batch"), [("sqrt", 256), ("token_half_life", 8192)])
    def test_has_no_other_rate_where_the_rule_keeps_it(self, rule, to_batch):
        said = account(rule, 256, to_batch, noise_scale=100)
        assert "Noise does not dominate" in said
        assert "levels off" not in said

    @pytest.mark.parametrize(
        ("noise", "expected"),
        [(0.4, "20480 times the noise scale of 0.4."), (12.34, "664 times the noise scale of 12.3"),
         (8000, "1.02 times the noise scale of 8000."), (math.inf, "within the noise scale of inf"),
         (8192, "within the noise scale of 8192"), (8193, "within the noise scale of 8193")],
    )  # fmt: skip
    def test_is_shown_with_its_digits(self, noise, expected):
        said = account("sqrt", 256, 8192, noise_scale=noise)
        assert expected in said
        assert ("Noise dominates" in said) == (noise >= 8192)

    @every_rule
    def test_changes_no_number(self, rule):
        for noise in (1, 10**9, math.inf):
            assert scaled(rule, noise_scale=noise) == scaled(rule)

    def test_takes_what_the_diagnostics_return(self):
        fit = lb.fit_critical_batch_size([256, 1024, 4096], [5000.0, 2000.0, 1250.0])
        point = jnp.asarray(1024.0)
        of_a_run = lb.NoiseScale(point, point, point, point, point)
        for noise in (1024, np.float32(1024), point, fit, of_a_run):
            said = account("sqrt", 256, 8192, noise_scale=noise)
            assert "8 times the noise scale of 1024" in said


@pytest.mark.parametrize(("options", "largest"), [({}, 4093), ({"run_length": 2}, 8187)])
def test_legew_ends_where_the_warmup_fills_the_run(options, largest):
    """1000 steps of warm-up, 16000 of the run: k below 16."""
    scaled("legew", 256, largest, **options)
    with pytest.raises(ValueError, match=f"warmup_steps = 1000 .*got {largest + 1}.* has 1000 "):
        scaled("legew", 256, largest + 1, **options)


@pytest.mark.parametrize(
    ("rule", "needed"),
    [("adam_sde", "b1"), ("adam_sde", "b2"), ("adam_sde", "eps"), ("token_half_life", "b2"),
     ("legew", "warmup_steps"), ("legew", "total_steps")],
)  # fmt: skip
def test_says_what_a_rule_needs(rule, needed):
    without = dataclasses.replace(ADAMW, **{needed: None})
    with pytest.raises(ValueError, match=rf"settings\.{needed} must be given for .*{rule}"):
        scaled(rule, 256, 512, without)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"settings": {"learning_rate": 0.1}}, TypeError, "settings must be Hyperparameters"),
        ({"run_length": jnp.float32(-2)}, ValueError, "run_length must be in (0, inf), got -2"),
        ({"b2_floor": 0.9, "b2_ceiling": 0.8}, ValueError, "b2_floor must be at most b2_ceiling"),
        ({"noise_scale": jnp.nan}, ValueError, "noise_scale must be in (0, inf], got nan"),
        ({"noise_scale": np.ones(3)}, TypeError, "noise_scale must be a number in (0, inf]"),
    ],
)
def test_wrong_arguments(change, error, said):
    """What the ranges of single arguments, in test_public_arguments.py, do not say."""
    good = {"settings": ADAMW, "from_batch": 256, "to_batch": 512, "rule": "sqrt"}
    with pytest.raises(error) as caught:
        lb.scale_hyperparameters(**(good | change))
    assert said in str(caught.value)


RATES = st.floats(0, 0.99999)
SETTINGS = st.builds(
    lb.Hyperparameters,
    learning_rate=st.floats(1e-6, 10),
    weight_decay=st.floats(0, 10),
    momentum=RATES,
    b1=RATES,
    b2=RATES,
    eps=st.floats(0, 1),
    warmup_steps=st.integers(0, 10**6),
    total_steps=st.integers(10**6 + 1, 10**7),
)
BATCHES = st.integers(32, 2**22)
RULE = st.sampled_from(sorted(RULES))
the_same_each_time = hypothesis_settings(derandomize=True, deadline=None)


@the_same_each_time
@given(SETTINGS, BATCHES, RULE)
@example(dataclasses.replace(ADAMW, b1=0.3, b2=0.3), 256, "adam_sde")  # where 1 - b is rounded
def test_the_same_batch_changes_nothing(settings, batch, rule):
    assert scaled(rule, batch, batch, settings) == settings


@the_same_each_time
@given(SETTINGS, BATCHES, BATCHES, RULE, st.floats(0.01, 100))
def test_the_account_fits_a_terminal(settings, old, new, rule, run_length):
    assume(rule != "legew")  # which may refuse
    said = result(rule, old, new, settings, run_length=run_length, noise_scale=12_345).account
    assert max(map(len, said.splitlines())) <= 80


@the_same_each_time
@given(SETTINGS, BATCHES, BATCHES, RULE)
def test_bounds_never_move_a_b2_that_was_outside(settings, old, new, rule):
    """It may move towards them, but not on, and they do not pull it in."""
    assume(rule != "legew")
    after, before = scaled(rule, old, new, settings).b2, settings.b2
    assert min(before, 0.95) <= after <= max(before, 0.9999)
    if new > old:
        assert after <= before
    if new < old:
        assert after >= before


@the_same_each_time
@given(SETTINGS, st.integers(1, 10**4), st.floats(1, 4), RULE)
def test_there_and_back_from_anywhere(settings, batch, run_length, rule):
    """As long as nothing stops at a bound, and but for the rounding of steps."""
    assume(rule != "legew")
    bounds = {"b2_floor": 0.0, "b2_ceiling": 0.9999999}
    start = dataclasses.replace(settings, b1=0.95, b2=max(settings.b2, 0.8))
    there = scaled(rule, batch, 4 * batch, start, run_length=run_length, **bounds)
    back = scaled(rule, 4 * batch, batch, there, run_length=1 / run_length, **bounds)
    before, after = numbers(start), numbers(back)
    for steps in ("warmup_steps", "total_steps"):
        assert abs(before.pop(steps) - after.pop(steps)) <= 4
    assert after == pytest.approx(before, rel=1e-9)


def test_a_batch_size_for_the_length_of_a_run():
    assert lb.scale_batch_size(512, run_length=1) == 512
    assert lb.scale_batch_size(512, run_length=8) == round(512 * 8**0.383)
    assert lb.scale_batch_size(512, run_length=4, power=0.5) == 1024
    assert lb.scale_batch_size(1, run_length=1e-9) == 1
