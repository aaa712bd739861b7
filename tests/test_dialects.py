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


def decayed(name):
    return not any(word in name for word in ("bias", "beta", "gamma"))


def adapted(name):
    return "bias" not in name


def matrix(name):
    return WEIGHTS[name].ndim > 1


def not_vector(name):
    return WEIGHTS[name].ndim != 1


def only(rule):
    """The weight decay of the leaves that a rule selects."""
    return lambda name: WD if rule(name) else 0.0


def lamb(gradients=GRADIENTS, **switches):
    switches = {"lr": LR["LAMB"], "wd": WD, **switches}
    return reference.trajectory(reference.lamb, WEIGHTS, gradients, **switches)


def apex(**switches):
    return lamb(CLIPPED, **{"wd": only(decayed), "adapted": decayed, **switches})


def lans(**switches):
    switches = {"lr": LR["LANS"], "wd": WD, **switches}
    return reference.trajectory(reference.lans, WEIGHTS, GRADIENTS, **switches)


def apex_lans(**switches):
    return lans(norm_eps=1e-6, **switches)


def lars(family=reference.lars, **switches):
    switches = {"lr": LR["LARS and LARC"], "wd": WD, **switches}
    return reference.trajectory(family, WEIGHTS, GRADIENTS, **switches)


def timm_lars(**switches):
    return lars(eps=1e-8, scaled_momentum=False, **switches)


def fair_lars(rule=lambda name: True, **switches):
    """Where the rate lies outside of the buffer and the denominator is that of the update."""
    switches = {"wd": only(rule), "adapted": rule, **switches}
    return lars(of_update=True, scaled_momentum=False, **switches)


def solo_lars(**switches):
    return lars(reference.larc, **{"trust": 0.001, "clip": False, **switches})


def lbsgd(strategy, **switches):
    switches = {"lr": LR["LBSGD"], "wd": WD, "scale": 4, "warmup": 16, **switches}
    return reference.trajectory(reference.lbsgd, WEIGHTS, GRADIENTS, strategy=strategy, **switches)


def mindspore_groups():
    vector = re.compile("bias|beta").search
    return lamb(
        lr=lambda name: RATES if vector(name) else LR["LAMB"],
        wd=lambda name: 0.0 if vector(name) else DECAYS if "conv" in name else WD,
        centralized=lambda name: "conv" in name,
    )


FORMULAS = {
    "arXiv v5, ICLR 2020, optax": lamb,
    "arXiv v3, BERT-style TF1 scripts": lambda: lamb(wd=only(decayed), correction="none"),
    "ALBERT, exclude_from_weight_decay alone": lambda: lamb(
        wd=only(decayed), adapted=decayed, correction="none"
    ),
    "ALBERT, both lists": lambda: lamb(wd=only(decayed), adapted=adapted, correction="none"),
    "NVIDIA BERT (TF1)": lambda: lamb(wd=only(decayed)),
    "arXiv v1": lambda: lamb(eps=0.0, eps_in_root=1e-6),
    "MXNet 2.0 LAMB": lambda: lamb(clip=0.1, bounds=(0.5, 2.0)),
    "MXNet 2.0 LAMB, bias_correction=False": lambda: lamb(correction="none"),
    "TensorFlow Addons 0.19, exclude_from_weight_decay alone": lambda: lamb(
        wd=only(decayed), adapted=decayed
    ),
    "TensorFlow Addons 0.19, both lists": lambda: lamb(wd=only(decayed), adapted=adapted),
    "MLPerf v1 BERT": apex,
    "Apex FusedLAMB, timm Lamb, mmpretrain Lamb": apex,
    "NVLAMB: Apex use_nvlamb=True, timm always_adapt=True": lambda: apex(adapted=True),
    "Perceiver IO": lambda: apex(adapted=True),
    "Apex and timm, grad_averaging=False": lambda: apex(b3=1.0),
    "Apex and timm, bias_correction=False": lambda: apex(correction="none"),
    "Apex FusedLAMB, adam_w_mode=False": lambda: apex(decay="gradient"),
    "LAMBC: timm trust_clip=True": lambda: apex(ratio_bounds=(0.0, 1.0)),
    "timm decoupled_decay=True": lambda: lamb(CLIPPED, decay="weights"),
    "Keras 3 Lamb": lambda: lamb(eps=1e-7, decay="weights"),
    "ColossalAI DistributedLamb": lambda: lamb(correction="step size"),
    "ColossalAI Lamb": lambda: lamb(correction="none"),
    "DeepSpeed FusedLamb": lambda: lamb(
        eps=1e-8, correction="step size", ratio_bounds=(0.01, 10.0)
    ),
    "DeepSpeed FusedLamb, eps_inside_sqrt=True, max_coeff=0.5": lambda: lamb(
        eps=0.0, eps_in_root=1e-8, correction="step size", ratio_bounds=(0.01, 0.5)
    ),
    "DeepSpeed OnebitLamb, before it compresses": lambda: lamb(
        eps=1e-8, correction="none", ratio_bounds=(0.01, 10.0)
    ),
    "cybertronai pytorch-lamb": lambda: lamb(correction="none", bounds=(0.0, 10.0)),
    "NVIDIA Transformer-XL, pytorch_optimizer weight_decouple=False": lambda: lamb(
        correction="none", bounds=(0.0, 10.0), ratio_eps=1e-6
    ),
    "NVIDIA Transformer-XL Lamb, adam=True": lambda: lamb(correction="none", adapted=False),
    "pytorch_optimizer 4.1 Lamb": lambda: lamb(
        correction="none", bounds=(0.0, 10.0), ratio_eps=1e-6, decay="weights"
    ),
    "MindSpore nn.Lamb": lambda: lamb(
        wd=only(lambda name: "beta" not in name and "gamma" not in name)
    ),
    "MindSpore nn.Lamb with parameter groups": mindspore_groups,
    "arXiv 2006.13484, MXNet 2.0 LANS": lans,
    "MXNet 2.0 LANS, bounds and clip_gradient": lambda: lans(clip=0.1, bounds=(0.5, 2.0)),
    "MXNet 2.0 LANS, use_fused_step=False": lambda: lans(sequential=True),
    "Apex FusedLANS": apex_lans,
    "Apex FusedLANS, grad_averaging=False": lambda: apex_lans(b3=1.0),
    "Apex FusedLANS, bias_correction=False": lambda: apex_lans(corrected=False),
    "Apex FusedLANS, adam_w_mode=False": lambda: apex_lans(decay="gradient"),
    "Apex FusedLANS, normalize_grad=False": lambda: lans(normalized=False),
    "arXiv 1708.03888": lars,
    "MXNet 2.0 LARS": lambda: lars(
        eps=1e-8,
        clip=0.5,
        adapted=lambda name: not name.endswith(("bias", "beta", "gamma")),
    ),
    "MLPerf LARS (TF2)": lambda: lars(wd=only(decayed), adapted=decayed),
    "MLPerf LARS (TF2) as Keras runs it, use_nesterov=True": lambda: lars(
        wd=only(decayed), adapted=decayed, eps=1e-7, nesterov=True
    ),
    "optax": lambda: lars(of_update=True),
    "SimCLR (TF1, TF2)": lambda: lars(wd=only(decayed), adapted=decayed, of_update=True),
    "SimCLR, use_nesterov=True": lambda: lars(
        wd=only(decayed), adapted=decayed, of_update=True, nesterov=True
    ),
    "SimCLR, both lists": lambda: lars(wd=only(decayed), adapted=adapted, of_update=True),
    "SimCLR, classic_momentum=False": lambda: lars(
        reference.lars_of_buffer, wd=only(decayed), adapted=decayed
    ),
    "SimCLR, classic_momentum=False, use_nesterov=True": lambda: lars(
        reference.lars_of_buffer, wd=only(decayed), adapted=decayed, nesterov=True
    ),
    "Barlow Twins, VICReg and BYOL without filters": fair_lars,
    "BYOL and DetCon": lambda: fair_lars(decayed),
    "BYOL, weight_decay_filter alone": lambda: fair_lars(decayed, adapted=True),
    "Barlow Twins and VICReg with both filters, DINO": lambda: fair_lars(not_vector),
    "Barlow Twins, weight_decay_filter alone": lambda: fair_lars(not_vector, adapted=True),
    "Barlow Twins, two rates": lambda: fair_lars(
        not_vector, lr=lambda name: LR["LARS and LARC"] if not_vector(name) else RATES
    ),
    "VISSL, exclude_bias_and_norm=True": lambda: fair_lars(not_vector, wd=WD),
    "MoCo v3, linear probe of MAE and EVA": lambda: fair_lars(matrix),
    "mmpretrain LARS": lambda: lars(eps=1e-8),
    "mmpretrain LARS, nesterov=True": lambda: lars(eps=1e-8, nesterov=True),
    "mmpretrain LARS, lars_exclude": lambda: lars(eps=1e-8, adapted=adapted),
    "mmpretrain LARS, dampening": lambda: lars(eps=1e-8, dampening=DAMPENING),
    "timm Lars": lambda: timm_lars(wd=only(decayed), adapted=decayed),
    "timm Lars, nesterov=True": lambda: timm_lars(wd=only(decayed), adapted=decayed, nesterov=True),
    "timm Lars, trust_clip=True": lambda: timm_lars(at_most_sgd=True),
    "pytorch_optimizer 4.1 LARS": lambda: lars(
        wd=only(matrix), adapted=matrix, scaled_momentum=False
    ),
    "Apex LARC": lambda: lars(reference.larc),
    "Apex LARC, clip=False": lambda: lars(reference.larc, clip=False),
    "Apex LARC, nesterov=True, a group without decay": lambda: lars(
        reference.larc, wd=only(decayed), nesterov=True
    ),
    "solo-learn LARS": lambda: solo_lars(wd=only(decayed), nesterov=True),
    "solo-learn LARS, exclude_bias_n_norm=True": lambda: solo_lars(
        wd=only(not_vector), adapted=not_vector
    ),
    "solo-learn LARS, clip_lr=True": lambda: solo_lars(clip=True),
    "solo-learn LARS, dampening": lambda: solo_lars(dampening=DAMPENING),
    "MXNet 1.9 LBSGD, linear": lambda: lbsgd("linear"),
    "MXNet 1.9 LBSGD, power2": lambda: lbsgd("power2"),
    "MXNet 1.9 LBSGD, sqrt": lambda: lbsgd("sqrt"),
    "MXNet 1.9 LBSGD, lars": lambda: lbsgd("lars"),
    "MXNet 1.9 LBSGD, begin_epoch and clip_gradient": lambda: lbsgd("linear", begin=8, clip=0.3),
}


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
    assert_same(run(row.optimizer, WEIGHTS, GRADIENTS), FORMULAS[row.dialect]())


def test_rows_and_formulas_are_the_same():
    assert sorted(row.dialect for row in ROWS) == sorted(FORMULAS)


def test_calls_that_are_written_differently_give_different_numbers():
    """Otherwise the network would not show what a row says is different."""
    calls = {(row.family, row.call): FORMULAS[row.dialect]() for row in ROWS}
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


def test_every_system_with_a_muon_has_a_row():
    recorded = json.loads((golden.HERE / "muon_peers.json").read_text())
    shown = {recorded["cases"][run]["dialect"] for _, _, run in MUON[1:]}
    hooks = {"nvidia_hook_muon", "nvidia_hook_adam"}  # a trust ratio, and MuonHyperball
    assert shown == muon_peers.DIALECTS.keys() - hooks
