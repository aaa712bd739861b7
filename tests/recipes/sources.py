"""The published runs, and the schedule of each source as a formula.

`sources.json` has a line for each run: how it is asked for, the formula with its numbers, the steps
at which the schedule is compared (both ends, and around each edge), and other numbers. Epochs are
counted in steps there, rounded as the source does it. Those of MLPerf are from MLCommons,
training_5.0.0/rcps_bert.json and training_4.0.0/rcps_resnet.json.
"""

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


def mlperf_bert(peak, begin, warmup, total):
    """Google's BERT: the warm-up replaces the start of a decay that is counted from step 0."""
    return lambda t: peak * ((t - begin) / warmup if t - begin < warmup else max(1 - t / total, 0))


def mlperf_resnet(peak, warmup, decay_steps):
    def rate(t):
        if t < warmup:
            return peak * t / warmup
        return 1e-4 + (peak - 1e-4) * max(1 - (t - warmup) / decay_steps, 0) ** 2

    return rate


def nvidia(peak, warmup, total):
    return lambda t: peak * (t / warmup if t < warmup else max(1 - t / total, 0) ** 0.5)


def lans_paper(peak, warmup, hold, total):
    def rate(t):
        if t < warmup:
            return peak * t / warmup
        return peak * min((total - t) / (total - warmup - hold), 1)

    return rate


def polynomial(peak, power, warmup, total, end=0.0):
    return lambda t: (
        peak * t / warmup
        if t < warmup
        else end + (peak - end) * (1 - (t - warmup) / (total - warmup)) ** power
    )


def goyal(batch_size):
    def rate(t):
        epoch = t * batch_size / IMAGES
        peak = 0.1 * batch_size / 256
        drops = sum(epoch >= drop for drop in (30, 60, 80))
        warmup = round(5 * IMAGES / batch_size)
        return 0.1 + (peak - 0.1) * t / warmup if t < warmup else peak * 0.1**drops

    return rate


def cosine(peak, warmup, total, *, begin=0.0, end=0.0):
    def rate(t):
        if t < warmup:
            return begin + (peak - begin) * t / warmup
        part = min((t - warmup) / (total - warmup), 1)
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * part))

    return rate


def timm(peak, epochs, warmup, of_epoch, *, begin=1e-6, end=1e-5):
    """timm's cosine: once in an epoch, over all epochs, the first ones replaced by a warm-up."""

    def rate(t):
        epoch = t // of_epoch
        if epoch >= epochs:
            return end
        if epoch < warmup:
            return begin + epoch * (peak - begin) / warmup
        return end + 0.5 * (peak - end) * (1 + math.cos(math.pi * epoch / epochs))

    return rate


def swav(epochs, of_epoch=312, warmup=10, *, base=4.8, start=0.3, last=0.0048):
    """As main_swav.py makes it: a linspace, and a cosine over the steps that are left."""
    grown = np.linspace(start, base, of_epoch * warmup)
    left = of_epoch * (epochs - warmup)
    waves = last + 0.5 * (base - last) * (1 + np.cos(np.pi * np.arange(left) / left))
    table = np.concatenate([grown, waves, [last]])
    return lambda t: table[t]


def eva(peak, total):
    """As scheduler.py of EVA: the warm-up counts its steps from 1, the cosine from 0."""
    after = cosine(peak, 2000, total)
    return lambda t: peak * (t + 1) / 2000 if t < 2000 else after(t)


def half_constant(peak, total):
    half = total // 2
    after = cosine(peak, 0, total - half)
    return lambda t: peak if t < half else after(t - half)


def rnnt(peak, hold, gamma, warmup, of_epoch):
    def rate(t):
        if t < warmup * of_epoch:
            return peak * (t + 1) / (warmup * of_epoch + 1)
        after = t // of_epoch - warmup - hold
        return max(peak * gamma ** (after + 1), 1e-5) if after >= 0 else peak

    return rate


def fastpitch():
    return lambda t: 0.1 * (t / 1000**1.5 if t < 1000 else t**-0.5)


def zipformer():
    def rate(t):
        fallen = (1 + (t / 7500) ** 2) * (1 + (t // 2500 / 3.5) ** 2)
        return 0.045 * min(0.1 + 0.9 * t / 500, 1) * fallen**-0.25

    return rate


FORMULAS = (
    mlperf_bert, mlperf_resnet, nvidia, lans_paper, polynomial, goyal, cosine, timm, swav, eva,
    half_constant, rnnt, fastpitch, zipformer,
)  # fmt: skip
RULES = {rule.__name__: rule for rule in FORMULAS}


def run_of(line):
    rate = RULES[line["rule"]](**line["settings"])
    return Run(line["name"], line["asked"], rate, line["steps"], line.get("numbers", {}))


RUNS = [*map(run_of, json.loads(Path(__file__).with_name("sources.json").read_text()))]
