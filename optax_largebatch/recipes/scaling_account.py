"""The account of `scale_hyperparameters`: what moved and why, and how far the rule holds."""

from collections.abc import Mapping
import math
import textwrap
from typing import NamedTuple

from optax_largebatch.recipes.scaling_rules import RULES, DecayKind, Moved, RuleName

COLUMNS = 80
OPTIMIZERS: Mapping[DecayKind, str] = {
    "decoupled": "AdamW, Muon",
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
    run_length: float,
    assumed_decay: DecayKind | None,
    noise_scale: float | None,
) -> str:
    """The account, in lines of at most 80 columns.

    Args:
        rule: the name of the rule.
        lines: the hyperparameters of the run, the learning rate first.
        batches: the old batch size and the new one.
        run_length: the examples of the new run over those of the old one.
        assumed_decay: the kind of weight decay, if the caller did not say.
        noise_scale: in examples, or None.
    """
    old, new = batches
    examples = "" if run_length == 1 else f", examples times r = {run_length:g}"
    sentences = [RULES[rule].valid.format(end=_end_of_adam_sde(lines, old))]
    if assumed_decay is not None:
        sentences.append(f"Assumes decay_kind={assumed_decay!r} ({OPTIMIZERS[assumed_decay]}).")
    if noise_scale is not None:
        sentences.append(_about_noise(rule, lines[0].after.value, old, new, noise_scale))
    return "\n".join(
        [
            _wrapped(f"{rule}, batch size {old} to {new} (k = {new / old:g}){examples}:"),
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


def _about_noise(rule: RuleName, rate: float, old: int, new: int, noise_scale: float) -> str:
    """Whether noise still dominates; if not, what a rate that levels off would be."""
    if new <= noise_scale:
        return f"Noise dominates: {new} is within the noise scale of {noise_scale:.0f}."
    said = (
        f"Noise no longer dominates: {new} is {new / noise_scale:.2g} times the noise scale of "
        f"{noise_scale:.0f}."
    )
    power = RULES[rule].batch_power
    if power == 0:
        return said
    level = rate * ((old + noise_scale) / (new + noise_scale)) ** power
    return (
        f"{said} There the rule asks for too much: a rate that levels off as "
        f"(1 + {noise_scale:.0f} / B)^-{power:g} would be {level:.3g}."
    )


def _end_of_adam_sde(lines: list[Line], old: int) -> str:
    """The batch size at which 1 - k (1 - b) is 0 for the smaller b."""
    rates = [(line.before, line.name) for line in lines if line.name in ("b1", "b2")]
    if not rates:
        return ""
    b, name = min(rates)
    return f"a batch size of {math.floor(old / (1 - b) * (1 + 1e-12))}, where {name} would be 0"


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, COLUMNS, break_on_hyphens=False, break_long_words=False)
