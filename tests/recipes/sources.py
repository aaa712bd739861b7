"""The published runs, and the schedule of each source as a formula.

`sources.json` has a line for each run: how it is asked for, the formula with its numbers, the steps
at which the schedule is compared (both ends, and around each edge), and other numbers. Epochs are
counted in steps there, rounded as the source does it. Those of MLPerf are from MLCommons,
training_5.0.0/rcps_bert.json and training_4.0.0/rcps_resnet.json.
"""

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

IMAGES = 1281167


class Run(NamedTuple):
    """A published run: how it is asked for, its schedule as a formula, and where to look at it."""

    name: str
    asked: dict
    rate: object
    steps: tuple[int, ...]
    numbers: dict

    def __repr__(self):
        return "-".join([self.name, *map(str, self.asked.values())])


def mlperf_bert(t, peak, begin, warmup, total):
    """Google's BERT: the warm-up replaces the start of a decay that is counted from step 0."""
    return peak * ((t - begin) / warmup if t - begin < warmup else max(1 - t / total, 0))


def mlperf_resnet(t, peak, warmup, decay_steps):
    if t < warmup:
        return peak * t / warmup
    return 1e-4 + (peak - 1e-4) * max(1 - (t - warmup) / decay_steps, 0) ** 2


def nvidia(t, peak, warmup, total):
    return peak * (t / warmup if t < warmup else max(1 - t / total, 0) ** 0.5)


def lans_paper(t, peak, warmup, hold, total):
    if t < warmup:
        return peak * t / warmup
    return peak * min((total - t) / (total - warmup - hold), 1)


def polynomial(t, peak, power, warmup, total, end=0.0):
    if t < warmup:
        return peak * t / warmup
    return end + (peak - end) * (1 - (t - warmup) / (total - warmup)) ** power


def goyal(t, batch_size):
    epoch = t * batch_size / IMAGES
    peak = 0.1 * batch_size / 256
    drops = sum(epoch >= drop for drop in (30, 60, 80))
    warmup = round(5 * IMAGES / batch_size)
    return 0.1 + (peak - 0.1) * t / warmup if t < warmup else peak * 0.1**drops


def cosine(t, peak, warmup, total, *, begin=0.0, end=0.0):
    if t < warmup:
        return begin + (peak - begin) * t / warmup
    part = min((t - warmup) / (total - warmup), 1)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * part))


def timm(t, peak, epochs, warmup, of_epoch, *, begin=1e-6, end=1e-5):
    """timm's cosine: once in an epoch, over all epochs, the first ones replaced by a warm-up."""
    epoch = t // of_epoch
    if epoch < warmup:
        return begin + epoch * (peak - begin) / warmup
    return cosine(epoch, peak, 0, epochs, end=end)


def swav(t, epochs, of_epoch=312, warmup=10, *, base=4.8, start=0.3, last=0.0048):
    """As main_swav.py makes it: a linspace, and a cosine over the steps that are left."""
    grown = of_epoch * warmup
    if t < grown:
        return np.linspace(start, base, grown)[t]
    return cosine(t, base, grown, of_epoch * epochs, end=last)


def eva(t, peak, total):
    """As scheduler.py of EVA: the warm-up counts its steps from 1, the cosine from 0."""
    return peak * (t + 1) / 2000 if t < 2000 else cosine(t, peak, 2000, total)


def half_constant(t, peak, total):
    return cosine(max(t - total // 2, 0), peak, 0, total - total // 2)


def rnnt(t, peak, hold, gamma, warmup, of_epoch):
    if t < warmup * of_epoch:
        return peak * (t + 1) / (warmup * of_epoch + 1)
    after = t // of_epoch - warmup - hold
    return max(peak * gamma ** (after + 1), 1e-5) if after >= 0 else peak


def fastpitch(t):
    return 0.1 * (t / 1000**1.5 if t < 1000 else t**-0.5)


def zipformer(t):
    fallen = (1 + (t / 7500) ** 2) * (1 + (t // 2500 / 3.5) ** 2)
    return 0.045 * min(0.1 + 0.9 * t / 500, 1) * fallen**-0.25


FORMULAS = (
    mlperf_bert, mlperf_resnet, nvidia, lans_paper, polynomial, goyal, cosine, timm, swav, eva,
    half_constant, rnnt, fastpitch, zipformer,
)  # fmt: skip
RULES = {rule.__name__: rule for rule in FORMULAS}


def run_of(line):
    rate = functools.partial(RULES[line["rule"]], **line["settings"])
    return Run(line["name"], line["asked"], rate, line["steps"], line.get("numbers", {}))


RUNS = [*map(run_of, json.loads(Path(__file__).with_name("sources.json").read_text()))]
