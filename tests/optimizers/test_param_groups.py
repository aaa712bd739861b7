"""Parameter groups: MindSpore's, for every optimizer, and the errors of their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests import reference
from tests.helpers import first_step
from tests.trajectories import STEPS, assert_same, network, run

WEIGHTS, GRADIENTS = network()
LR, WD = 0.05, 0.1
RATES = np.linspace(0.1, 0.01, STEPS)
DECAYS = np.linspace(0.3, 0.05, STEPS)

CONV = {
    "params": lb.matching("conv"),
    "learning_rate": lb.values_schedule(RATES),
    "learning_rate_scale": 0.5,
}
DENSE = {
    "params": lb.matching("dense"),
    "learning_rate_scale": 0.1,
    "weight_decay": lb.values_schedule(DECAYS),
}
NORM = {"params": lb.matching("norm"), "learning_rate": 0.03, "weight_decay": 0.0}
GROUPS = lb.param_groups(CONV, DENSE, NORM)
RATE, DECAY = np.linspace(0.02, 0.06, STEPS), np.linspace(0.1, 0.2, STEPS)

RATES_OF_GROUPS = {"conv": 0.5 * RATES, "dense": 0.1 * RATE, "norm": 0.03}
IN_GROUPS = {
    "lr": lambda name: RATES_OF_GROUPS.get(name.split("/")[0], RATE),
    "wd": lambda name: {"dense": DECAYS, "norm": 0.0}.get(name.split("/")[0], DECAY),
}
"""The same groups for the formulas; `gain` and `unused/kernel` are in none."""

LBSGD = {"momentum": 0.9, "batch_scale": 4, "warmup_epochs": 2, "updates_per_epoch": 8}
OPTIMIZERS = {
    "lamb": (lb.lamb, {}, reference.lamb, {}),
    "lamb, bias correction in the step size": (
        lb.lamb,
        {"bias_correction": "step_size"},
        reference.lamb,
        {"correction": "step size"},
    ),
    "lans": (lb.lans, {}, reference.lans, {}),
    "lans, sequential": (lb.lans, {"order": "sequential"}, reference.lans, {"sequential": True}),
    "lars": (lb.lars, {}, reference.lars, {}),
    "lars, momentum of directions": (
        lb.lars,
        {"learning_rate_in_momentum": False},
        reference.lars,
        {"scaled_momentum": False},
    ),
    "larc": (lb.larc, {}, reference.larc, {}),
    "lbsgd, linear": (
        lb.lbsgd,
        LBSGD,
        reference.lbsgd,
        {"scale": 4, "strategy": "linear", "warmup": 16},
    ),
    "lbsgd, lars": (
        lb.lbsgd,
        LBSGD | {"warmup_strategy": "lars"},
        reference.lbsgd,
        {"scale": 4, "strategy": "lars", "warmup": 16},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_group_has_its_rate_and_decay(name, x64):
    """A rate of its own, or a fraction of that or of the optimizer's schedule."""
    factory, arguments, formula, switches = OPTIMIZERS[name]
    rate, decay = map(lb.values_schedule, (RATE, DECAY))
    ours = run(factory(rate, weight_decay=decay, groups=GROUPS, **arguments), WEIGHTS, GRADIENTS)
    assert_same(ours, reference.trajectory(formula, WEIGHTS, GRADIENTS, **IN_GROUPS, **switches))


def test_a_fraction_of_an_injected_rate():
    groups = lb.param_groups({"params": lb.matching("dense"), "learning_rate_scale": 0.0})
    optimizer = optax.inject_hyperparams(lb.lamb)(0.5, groups=groups)
    weights = jax.tree.map(jnp.float32, WEIGHTS)
    updates, _ = first_step(optimizer, weights, weights)
    for name, update in updates.items():
        assert np.any(update) == ("dense" not in name and np.any(WEIGHTS[name]))


def test_the_masks_hold_inside_the_groups(x64):
    groups = lb.param_groups({"params": lb.matching("dense"), "weight_decay": 0.5})
    mask = ~lb.matching("bias")
    optimizer = lb.lamb(LR, weight_decay=WD, weight_decay_mask=mask, groups=groups)
    theirs = reference.trajectory(
        reference.lamb,
        WEIGHTS,
        GRADIENTS,
        lr=LR,
        wd=lambda name: 0.0 if "bias" in name else 0.5 if "dense" in name else WD,
    )
    assert_same(run(optimizer, WEIGHTS, GRADIENTS), theirs)


BIAS = lb.matching("bias")
KEYS = ("params", "learning_rate", "learning_rate_scale", "weight_decay")
BAD_GROUPS = {
    "unknown key": ({"params": BIAS, "lr": 0.1}, ValueError, ("'lr'", *KEYS)),
    "no dictionary": ("bias", TypeError, ("each group", "'bias'", "str", "dictionary")),
    "a list of them": ([CONV, NORM], TypeError, ("each group", "list", "dictionary")),
    "no params": ({"weight_decay": 0.1}, TypeError, ("'params'", "None", "rule")),
    "params a string": ({"params": "bias"}, TypeError, ("'params'", "'bias'", "str", "rule")),
    "the centralization of 0.1.0": (
        {"params": BIAS, "grad_centralization": True},
        ValueError,
        ("'grad_centralization'", "centralize_gradients(rule) in front"),
    ),
} | {
    f"{key} {value!r}": ({"params": BIAS, key: value}, error, (f"'{key}'", "[0, inf)", *parts))
    for key, value, error, *parts in (
        ("learning_rate", "fast", TypeError, "'fast'", "str", "schedule"),
        ("learning_rate", [0.1, 0.2], TypeError, "[0.1, 0.2]", "list", "schedule"),
        ("learning_rate", -0.1, ValueError, "-0.1"),
        ("weight_decay", None, TypeError, "None", "schedule"),
        ("weight_decay", float("nan"), ValueError, "nan"),
        ("learning_rate_scale", -0.1, ValueError, "-0.1"),
        ("learning_rate_scale", abs, TypeError),
    )
}


def assert_all_in(parts, error):
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, str(error.value)


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_a_bad_group_is_refused(case):
    group, error, parts = BAD_GROUPS[case]
    with pytest.raises(error) as raised:
        lb.param_groups(group)
    assert_all_in(parts, raised)


def test_a_pattern_that_matches_nothing():
    groups = lb.param_groups({"params": lb.matching("bias", "scale")})
    with pytest.raises(ValueError, match="matches no parameter") as raised:
        lb.lamb(LR, groups=groups).init(WEIGHTS)
    assert_all_in(("groups: ", "'scale'", *WEIGHTS), raised)


def test_a_rule_that_selects_nothing():
    groups = lb.param_groups({"params": lb.at_least_ndim(9), "weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"groups: at_least_ndim\(9\) selects no parameter"):
        lb.lamb(LR, groups=groups).init(WEIGHTS)


@pytest.mark.parametrize("more", [(), ({"params": ~NORM["params"], "weight_decay": 0.5},)])
def test_a_parameter_in_several_groups(more):
    groups = lb.param_groups(DENSE, {"params": BIAS, "weight_decay": 0.0}, *more)
    with pytest.raises(ValueError, match="in two groups") as raised:
        lb.lamb(LR, groups=groups).init(WEIGHTS)
    parts = ("groups", "'dense/bias'", "matching('dense')", "matching('bias')", "may be in one")
    assert_all_in(parts, raised)


def test_a_schedule_stays_in_the_range_of_its_argument():
    params = {"kernel": jnp.ones((4, 3))}
    optimizer = lb.eve(0.1, weight_decay=lambda step: 0.5)
    with pytest.raises(ValueError, match=r"what the schedule returns must be in \[0, 0.1\]"):
        first_step(optimizer, params, params)
