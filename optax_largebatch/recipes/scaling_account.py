"""The account of `scale_hyperparameters`: what moved and why, and how far the rule holds."""

from collections.abc import Mapping
import math
import textwrap
from typing import NamedTuple

from optax_largebatch.recipes.scaling_rules import (
    B1_FLOOR,
    RULES,
    Change,
    DecayKind,
    Moved,
    RuleName,
)

COLUMNS = 80
OPTIMIZERS: Mapping[DecayKind, str] = {
    "decoupled": "AdamW, Muon",
    "independent": "not multiplied by the rate, as in midGPT",
    "l2": "added to the gradient, as in SGD",
    "rescaled": "LAMB, LARS, the hyperball",
}


class Line(NamedTuple):
    """One hyperparameter, before and after."""

    name: str
    before: float
    after: Moved


def account(
    rule: RuleName,
    lines: list[Line],
    batches: tuple[int, int],
    change: Change,
    decay: tuple[DecayKind, bool] | None,
    noise_scale: float | None,
) -> str:
    """The account, in lines of at most 80 columns.

    Args:
        rule: the name of the rule.
        lines: the hyperparameters of the run, the learning rate first.
        batches: the old batch size and the new one.
        change: what differs between the two runs.
        decay: the kind of weight decay, and whether it is assumed; None if there is none.
        noise_scale: in examples, or None.
    """
    old, new = batches
    examples = "" if change.r == 1 else f", examples times r = {change.r:g}"
    sentences = [RULES[rule].valid]
    if rule == "adam_sde":
        sentences = [f"{RULES[rule].valid} {_about_bounds(lines, old, new, change)}".rstrip()]
    kind, assumed = decay or (None, False)
    if kind and assumed:
        sentences.append(f"Assumes decay_kind={kind!r} ({OPTIMIZERS[kind]}).")
    if noise_scale is not None:
        said = _about_noise(old, new, noise_scale)
        level = _levelled(rule, lines, old, new, noise_scale, kind)
        sentences.append(f"{said} {level}".rstrip())
    return "\n".join(
        [
            _wrapped(f"{rule}, batch size {old} to {new} (k = {change.k:g}){examples}:"),
            *_table(lines),
            *map(_wrapped, sentences),
        ]
    )


def _table(lines: list[Line]) -> list[str]:
    changes = [
        f"{_shown(line.before)} (kept)"
        if line.before == line.after.value
        else f"{_shown(line.before)} -> {_shown(line.after.value)}"
        for line in lines
    ]
    width = max(map(len, changes))
    return [
        f"  {line.name:<13}  {change:<{width}}  {line.after.why}"
        for line, change in zip(lines, changes, strict=True)
    ]


def _about_noise(old: int, new: int, noise_scale: float) -> str:
    """Whether noise dominates at both batch sizes."""
    largest, scale = max(old, new), _scale(noise_scale)
    if largest == float(scale):
        return f"Noise is as large as the gradient: {largest} is the noise scale."
    if largest < noise_scale:
        return f"Noise dominates: {largest} is within the noise scale of {scale}."
    said = f"{largest} is {_scale(largest / noise_scale)} times the noise scale of {scale}."
    if new <= noise_scale:
        return f"Noise dominates at {new}, but did not before: {said}"
    if old <= noise_scale:
        return f"Noise no longer dominates: {said}"
    return f"Noise does not dominate: {said}"


def _levelled(
    rule: RuleName,
    lines: list[Line],
    old: int,
    new: int,
    noise_scale: float,
    decay_kind: DecayKind | None,
) -> str:
    """What a rate that levels off would be, where noise does not dominate at both batch sizes."""
    if max(old, new) <= noise_scale:
        return ""
    power = RULES[rule].batch_power
    after = {line.name: line.after.value for line in lines}
    rate = after["learning_rate"]
    level = rate * ((old + noise_scale) / (new + noise_scale)) ** power
    if level == rate:
        return ""
    said = (
        f"The rule asks for too {'much' if level < rate else 'little'}: a rate that levels off as "
        f"(1 + {_scale(noise_scale)} / B)^-{power:g} would be {level:.3g}"
    )
    if decay_kind == "decoupled" and after["weight_decay"]:
        said += f"; with it, weight_decay {after['weight_decay'] * rate / level:.3g}"
    return f"{said}."


def _about_bounds(lines: list[Line], old: int, new: int, change: Change) -> str:
    """Where the first b stops under `adam_sde`."""
    if new < old:
        return "b1 has no ceiling."
    if new == old:
        return ""
    floors = {"b1": B1_FLOOR, "b2": change.b2_floor}
    stops = [
        (old * (1 - floors[line.name]) / (1 - line.before), line.name)
        for line in lines
        if line.name in floors
    ]
    stop, name = min(stops)
    if stop <= old:
        return f"{name} does not follow: it is not above its floor."
    stop = math.floor(stop * (1 + 1e-12))
    past = "is past it" if new > stop else "is not past it"
    return f"{name} meets its floor at a batch size of {stop}, and this run {past}."


def _scale(number: float) -> str:
    """A noise scale, or how many of them."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, COLUMNS, break_on_hyphens=False, break_long_words=False)
