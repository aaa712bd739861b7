"""Each rule of scaling with numbers worked out by hand, and where each ends."""

import dataclasses
import math

import numpy as np
import pytest

import optax_largebatch as lb

ADAM = lb.Hyperparameters(
    learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, warmup_steps=1000, total_steps=16000
)

# From 256 to 1024, k = 4: what each rule changes. The rest stays.
SHORTER = {"warmup_steps": 250, "total_steps": 4000}
EXPECTED = {
    "linear": SHORTER | {"learning_rate": 4e-3},
    "sqrt": SHORTER | {"learning_rate": 2e-3},
    "adam_sde": SHORTER | {"learning_rate": 2e-3, "b1": 0.6, "b2": 0.996, "eps": 5e-9},
    "token_half_life": SHORTER | {"b2": 0.996005996001},
    "legew": {"learning_rate": 2e-3, "total_steps": 4000},
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_worked_numbers(rule):
    scaled = lb.scale_hyperparameters(ADAM, 256, 1024, rule).settings
    expected = dataclasses.asdict(ADAM) | EXPECTED[rule]
    assert dataclasses.asdict(scaled) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rule", EXPECTED)
def test_there_and_back(rule):
    there = lb.scale_hyperparameters(ADAM, 256, 1024, rule).settings
    back = lb.scale_hyperparameters(there, 1024, 256, rule).settings
    assert dataclasses.asdict(back) == pytest.approx(dataclasses.asdict(ADAM), rel=1e-9)


@pytest.mark.parametrize("rule", EXPECTED)
def test_the_account_says_what_changed(rule):
    scaled = lb.scale_hyperparameters(ADAM, 256, 1024, rule)
    lines = {line.split()[0]: line for line in scaled.account.splitlines() if line[:2] == "  "}
    assert set(lines) == set(dataclasses.asdict(ADAM))
    for name, line in lines.items():
        assert ("->" in line) == (name in EXPECTED[rule])
        assert ("kept" in line) == (name not in EXPECTED[rule])
    assert "batch size 256 to 1024 (k = 4)" in str(scaled)


def test_token_half_life_is_the_same_in_tokens():
    """The weight of a gradient halves after as many examples as before."""
    new = lb.scale_hyperparameters(ADAM, 256, 8192, "token_half_life").settings
    halves = [math.log(0.5) / math.log(b2) * batch for b2, batch in ((0.999, 256), (new.b2, 8192))]
    np.testing.assert_allclose(*halves, rtol=1e-9)


def test_the_account_shows_all_digits_of_a_number_of_steps():
    long = lb.Hyperparameters(learning_rate=0.1, total_steps=1_234_567)
    assert "1234567 -> 617284" in str(lb.scale_hyperparameters(long, 256, 512, "sqrt"))


def test_what_is_not_there_is_not_scaled():
    scaled = lb.scale_hyperparameters(lb.Hyperparameters(learning_rate=0.1), 256, 512, "linear")
    assert scaled.settings == lb.Hyperparameters(learning_rate=0.2)
    assert "total_steps" not in scaled.account


def test_adam_sde_ends_where_a_decay_rate_would_be_negative():
    """b1 = 0.9 allows k = 10 at most."""
    at_the_end = lb.scale_hyperparameters(ADAM, 256, 2560, "adam_sde").settings
    assert at_the_end.b1 == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="to_batch must be at most 2560") as caught:
        lb.scale_hyperparameters(ADAM, 256, 2561, "adam_sde")
    for said in ("settings.b1 = 0.9", "got 2561", "no less than 0", "'sqrt'"):
        assert said in str(caught.value)
    slow = dataclasses.replace(ADAM, b1=0.9999)
    with pytest.raises(ValueError, match=r"settings\.b2 = 0\.999"):
        lb.scale_hyperparameters(slow, 256, 256 * 1001, "adam_sde")


def test_legew_ends_where_the_warmup_fills_the_run():
    """1000 steps of warm-up, 16000 of the run: k below 16."""
    lb.scale_hyperparameters(ADAM, 256, 15 * 256, "legew")
    with pytest.raises(ValueError, match=r"settings\.warmup_steps must be less than the 1000"):
        lb.scale_hyperparameters(ADAM, 256, 16 * 256, "legew")


@pytest.mark.parametrize(
    ("rule", "needed"),
    [("adam_sde", "b1"), ("adam_sde", "b2"), ("adam_sde", "eps"), ("token_half_life", "b2"),
     ("legew", "warmup_steps"), ("legew", "total_steps")],
)  # fmt: skip
def test_says_what_a_rule_needs(rule, needed):
    without = dataclasses.replace(ADAM, **{needed: None})
    with pytest.raises(ValueError, match=rf"settings\.{needed} must be given for .*{rule}"):
        lb.scale_hyperparameters(without, 256, 512, rule)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"settings": {"learning_rate": 0.1}}, TypeError, "settings must be Hyperparameters"),
        ({"from_batch": 0}, ValueError, "from_batch must be >= 1, got 0"),
        ({"to_batch": 512.0}, TypeError, "to_batch must be a Python integer"),
        ({"rule": "cubic"}, ValueError, "rule must be one of 'linear', 'sqrt', 'adam_sde'"),
    ],
)
def test_wrong_arguments(change, error, said):
    good = {"settings": ADAM, "from_batch": 256, "to_batch": 512, "rule": "sqrt"}
    with pytest.raises(error) as caught:
        lb.scale_hyperparameters(**(good | change))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [("learning_rate", 0.0, ValueError), ("b1", 1.0, ValueError), ("b2", -0.1, ValueError),
     ("eps", -1e-8, ValueError), ("warmup_steps", 1.5, TypeError), ("total_steps", 0, ValueError)],
)  # fmt: skip
def test_hyperparameters_are_checked(name, wrong, error):
    with pytest.raises(error, match=f"{name} must be"):
        lb.Hyperparameters(**({"learning_rate": 0.1} | {name: wrong}))
