"""The tables of docs/dialects.md, each call against the formula of its system."""

import fnmatch
import itertools
import json
import pathlib
import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests import golden, reference
from tests.golden import muon_peers
from tests.helpers import first_step
from tests.test_golden import assert_close
from tests.trajectories import STEPS, assert_same, difference, network, run

_TESTS = pathlib.Path(__file__).parent
PAGE = (_TESTS.parent / "docs" / "dialects.md").read_text()
FAMILIES = ("LAMB", "LANS", "LARS and LARC", "LBSGD")

WD = 0.1
DAMPENING = 0.3
LR = {
    "LAMB": 0.02,
    "LANS": np.linspace(0.01, 0.05, STEPS),
    "LARS and LARC": np.linspace(2.0, 0.5, STEPS),
    "LBSGD": np.linspace(0.05, 0.1, STEPS),
}
RATES = np.linspace(0.05, 0.01, STEPS)
DECAYS = np.linspace(0.2, 0.1, STEPS)
NAMES = {
    "lb": lb,
    "wd": WD,
    "lr_schedule": lb.values_schedule(RATES),
    "wd_schedule": lb.values_schedule(DECAYS),
    "decayed": ~lb.matching("bias", "beta", "gamma"),
    "adapted": ~lb.matching("bias"),
    "not_vectors": lb.at_least_ndim(2) | ~lb.at_least_ndim(1),
    "optax": optax,
    "first_and_others": lambda step: jnp.where(step == 0, 1.0, 1.0 - DAMPENING),
}
WEIGHTS, GRADIENTS = network()
CLIPPED = reference.clip_by_global_norm(GRADIENTS, 1.0)


class Row(NamedTuple):
    """One row of a table of dialects."""

    family: str
    dialect: str
    call: str
    runs: str

    @property
    def optimizer(self):
        """What the call builds; the learning rate is a number, or its table as a schedule."""
        rate = LR[self.family]
        lr = rate if isinstance(rate, float) else lb.values_schedule(rate)
        return eval(self.call, NAMES | {"lr": lr})

    @property
    def recorded(self):
        """The patterns of the recorded runs that the row names."""
        return re.findall(r"`(\w+\*?)`", self.runs)


def table(heading):
    """The cells of the table under a heading, row by row, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


ROWS = [
    Row(family, dialect, call.strip("`"), runs)
    for family in FAMILIES
    for dialect, _, call, runs in table(family)
]


def vector(name):
    """What MindSpore's groups take for one."""
    return "bias" in name or "beta" in name


NAMED = {
    "all": lambda name: True,
    "decayed": lambda name: not any(word in name for word in ("bias", "beta", "gamma")),
    "adapted": lambda name: "bias" not in name,
    "matrix": lambda name: WEIGHTS[name].ndim > 1,
    "not_vector": lambda name: WEIGHTS[name].ndim != 1,
    "not of a norm": lambda name: "beta" not in name and "gamma" not in name,
    "conv": lambda name: "conv" in name,
    "two rates": lambda name: LR["LARS and LARC"] if WEIGHTS[name].ndim != 1 else RATES,
    "rates of groups": lambda name: RATES if vector(name) else LR["LAMB"],
    "decays of groups": lambda name: not vector(name) and (DECAYS / WD if "conv" in name else 1),
}
"""Functions of the name of a parameter, by the words that stand for them in `dialects.json`."""
FORMULAS = json.loads((_TESTS / "dialects.json").read_text())
"""For each dialect the function of `reference`, and its arguments; `wd` is a factor of WD."""


def formula(row):
    """The trajectory of a dialect."""
    told = {"lr": LR[row.family], "wd": "all"} | FORMULAS[row.dialect]
    told = {key: NAMED.get(x, x) if isinstance(x, str) else x for key, x in told.items()}
    family, factor = getattr(reference, told.pop("of")), told.pop("wd")
    gradients = CLIPPED if told.pop("clipped", False) else GRADIENTS
    return reference.trajectory(
        family, WEIGHTS, gradients, wd=lambda name: WD * factor(name), **told
    )


# One whose recorded run in float64 is among the fast tests is there already.
RUN = [c.name for c in golden.cases() if c.dtype == "float64" and not golden.is_long(c)]
MARKED = [
    pytest.param(
        row,
        marks=[pytest.mark.slow] * any(fnmatch.filter(RUN, x) for x in row.recorded),
        id=row.dialect,
    )
    for row in ROWS
]


@pytest.mark.parametrize("row", MARKED)
def test_the_call_gives_the_numbers_of_the_dialect(row, x64):
    assert_same(run(row.optimizer, WEIGHTS, GRADIENTS), formula(row))


def test_rows_and_formulas_are_the_same():
    assert sorted(row.dialect for row in ROWS) == sorted(FORMULAS)


def test_calls_that_are_written_differently_give_different_numbers():
    """Otherwise the network would not show what a row says is different."""
    calls = {(row.family, row.call): formula(row) for row in ROWS}
    for (one, a), (other, b) in itertools.combinations(calls.items(), 2):
        if one[0] == other[0]:
            assert difference(a, b) > 1e-9, (one, other)


def test_every_recorded_run_is_of_a_row_and_every_pattern_of_a_run():
    others = ("icefall", "muon_peers")  # those of Muon: below
    runs = [case.name for case in golden.cases() if case.peer not in others]
    patterns = {pattern for row in ROWS for pattern in row.recorded}
    matched = {pattern: fnmatch.filter(runs, pattern) for pattern in patterns}
    assert all(matched.values()), matched
    assert set(runs) == set(itertools.chain.from_iterable(matched.values()))


MUON = [
    (dialect, call.strip("`"), run.strip("`"))
    for dialect, _, call, run in table("Muon and the hyperball")
]


@pytest.mark.parametrize(("dialect", "call", "run"), MUON[1:], ids=lambda x: x.split("(")[0])
def test_a_call_of_muon_replays_the_system_itself(dialect, call, run, x64):
    (case,) = [case for case in golden.cases() if case.name == run]
    recorded = json.loads((golden.HERE / "muon_peers.json").read_text())
    own = recorded["cases"][run]
    names = muon_peers.names(own, recorded["dialects"][own["dialect"]]["defaults"])
    written = case._replace(optimizer=eval(call, names))
    assert_close(written, "float64", 1e-11)  # some `eps` change no more than 1e-10


def test_the_calls_of_icefall_replay_it(x64):
    for *_, call, recorded in table("icefall"):
        (case,) = [case for case in golden.cases() if case.name == recorded.strip("`")]
        assert_close(case._replace(optimizer=eval(call.strip("`"))), "float64", 1e-11)


def test_the_floor_of_a_step_in_units_of_the_weights(x64):
    """Steps that are long enough pass as they are."""
    (call,) = re.findall(r"^`(lb.scale_by_trust_ratio\(.*\))` in front of the rate", PAGE, re.M)
    floor = eval(call, {"lb": lb})
    weights = {"short": jnp.full((4, 4), 2.0), "long": jnp.full((4, 4), 0.1)}
    step = {name: jnp.eye(4) for name in weights}
    floored, _ = first_step(floor, step, weights)
    np.testing.assert_allclose(floored["short"], 0.35 * 8.0 / 2.0 * jnp.eye(4), rtol=1e-12)
    np.testing.assert_allclose(floored["long"], jnp.eye(4), rtol=1e-12)


def test_every_system_with_a_muon_has_a_row():
    recorded = json.loads((golden.HERE / "muon_peers.json").read_text())
    shown = {recorded["cases"][run]["dialect"] for _, _, run in MUON[1:]}
    hooks = {"nvidia_hook_muon", "nvidia_hook_adam"}  # a trust ratio, and MuonHyperball
    assert shown == muon_peers.DIALECTS.keys() - hooks
