"""Explains what an optimizer will do with each parameter, before the first step."""

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from optax_largebatch.diagnostics import optimizer_facts
from optax_largebatch.params.likely_stacks import declaration
from optax_largebatch.params.paths import leaf_names

UNKNOWN = "?"
"""What is not known of parameters that only other libraries' transformations see."""

EMBEDDING = r"embed|(^|/)(w[tp]e|pos|positions?)(/|$)"
HEAD = r"(^|/)(lm_|output_)?head(/|$)|unembed|logits"

FUSED_3 = r"qkv|query_key_value|in_proj|c_attn"
FUSED_2 = r"(^|/|_)w?kv(_|/|$)|key_?value|gate_?up|up_?gate|(^|/)wi(_fused)?(/|$)|w1[23]|linear_fc1"
"""Names of arrays that often hold three matrices side by side, or two."""


@dataclasses.dataclass(frozen=True)
class ExplainedParameter:
    """One line of an `Explanation`."""

    name: str
    shape: tuple[int, ...]
    blocks: int
    """The number of layers in the parameter, each with a norm of its own; 1 if it stacks none."""
    matrices: Mapping[tuple[int, int], int]
    """How many matrices of these rows and columns it has, if Muon moves it."""
    direction: str
    """Where its steps go: `"muon"`, `"adam"`, `"momentum"`, or `"gradient"`; `"?"` if no
    transformation of this library sees the parameter."""
    length: str
    """What sets the length of its steps: `"trust ratio"` for that of the parameter, `"sphere"` for
    steps that keep its norm, `"size"` for its root mean square; empty if it is the rate alone."""
    decayed: bool
    rate: float | None
    """The learning rate, in units of the largest of all; None if it is not known."""
    notes: tuple[str, ...]
    """What looks wrong."""
    undeclared: str
    """If it looks like a stack of layers that is not declared, its entry in the argument of
    `stacked_layers`, such as `'layers/': 0`; otherwise empty."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`: print it, or read its `parameters`."""

    parameters: tuple[ExplainedParameter, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "blocks", "direction", "length", "decay", "rate", "")
        lines = [
            (
                printable(one.name),
                _times(one.shape) or "scalar",
                " + ".join(f"{number} of {_times(sides)}" for sides, number in one.matrices.items())
                or str(one.blocks),
                one.direction,
                _length(one),
                "yes" if one.decayed else UNKNOWN if one.direction == UNKNOWN else "-",
                UNKNOWN if one.rate is None else f"{one.rate:.3g}",
                "!" if one.notes else "",
            )
            for one in self.parameters
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        row = "  ".join(f"{{:{width}}}" for width in widths)
        rows = [row.format(*line).rstrip() for line in (head, *lines)]
        return "\n".join([*rows, self.summary(), *self._notes()])

    def _notes(self) -> list[str]:
        """What the marks mean."""
        noted: dict[str, list[str]] = {}
        for one in self.parameters:
            for note in one.notes:
                noted.setdefault(note, []).append(printable(one.name))
        notes = [f"! {', '.join(names)}: {note}" for note, names in noted.items()]
        entries = [one.undeclared for one in self.parameters if one.undeclared]
        return [*notes, f"  stacked={declaration(entries)}"] if entries else notes

    def summary(self) -> str:
        """How many numbers go in which direction."""
        numbers: dict[str, int] = {}
        for one in self.parameters:
            mover = f"{one.direction}, {one.length}" if one.length else one.direction
            numbers[mover] = numbers.get(mover, 0) + math.prod(one.shape)
        listed = "; ".join(f"{mover}: {number}" for mover, number in numbers.items())
        return f"{len(self.parameters)} parameters, {sum(numbers.values())} numbers ({listed})"


def explain(optimizer: optimizer_facts.Optimizer, params: Any) -> Explanation:
    r"""Says of each parameter who moves it and how, and marks what looks wrong.

    For each parameter it prints its blocks (an array, or the layers of an array that stacks
    layers), the direction of its steps, what sets their length (`3 x sphere` if its matrices share
    three norms), whether it is decayed, and its learning rate in units of the largest. It finds
    that in the optimizer, however it is wrapped. What other libraries' transformations move has a
    question mark.

    An exclamation mark stands by what is usually a mistake, and below the table by the reason:
    biases and scales of norms that are decayed, have a trust ratio or stay on a sphere; parameters
    on a sphere that start at zero or have a low precision; embeddings and heads that Muon moves, or
    that stay on a sphere; arrays of three axes that are no matrices beside Muon; stacks of layers
    that are not declared.

    Args:
        optimizer: the optimizer, of this library or with one inside.
        params: the parameters, or their shapes from `jax.eval_shape`.

    Returns:
        An `Explanation`, to be printed.

    Raises:
        TypeError: `optimizer` is no optimizer; it comes first.
        ValueError: the optimizer does not fit the parameters, as where a pattern matches none.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import explain, matching, muonh
        >>> params = {
        ...     "embed": jnp.ones((9, 4)), "head": jnp.ones((4, 9)),
        ...     "layers": {"bias": jnp.zeros((2, 8)), "kernel": jnp.ones((2, 4, 8))}}
        >>> optimizer = muonh(
        ...     0.01, adamh_mask=matching("head"), matrix_mask=~matching("embed"),
        ...     stacked={"layers/": 0})
        >>> print(explain(optimizer, params))
        parameter      shape  blocks    direction  length  decay  rate
        embed          9x4    1         adam       -       -      0.231
        head           4x9    1         adam       sphere  -      1
        layers/bias    2x8    2         adam       -       -      0.231
        layers/kernel  2x4x8  2 of 4x8  muon       sphere  -      1
        4 parameters, 152 numbers (adam: 52; adam, sphere: 36; muon, sphere: 64)
    """
    facts, leaves = optimizer_facts.facts_about(optimizer, params), jax.tree.leaves(params)
    forgotten = {one.number: one.entry for one in optimizer_facts.forgotten_stacks(facts, params)}
    rates = optimizer_facts.relative_rates([(known or {}).get("rate") for known in facts.of_each])
    lines = []
    for number, (name, leaf) in enumerate(zip(leaf_names(params), leaves, strict=True)):
        known, axes, shape = facts.of_each[number], facts.axes[number], tuple(np.shape(leaf))
        line = ExplainedParameter(
            name,
            shape,
            facts.blocks[number],
            (known or {}).get("matrices", {}),
            UNKNOWN if known is None else known.get("direction", "gradient"),
            facts.lengths[number],
            "decay" in (known or {}),
            rates[number],
            (),
            forgotten.get(number, ""),
        )
        notes = _notes_on(line, leaf, len(shape) - len(axes), facts.has_muon)
        if line.matrices and not (known or {}).get("by_text"):
            notes += _notes_on_fused(name, shape, axes)
        lines.append(dataclasses.replace(line, notes=tuple(notes)))
    return Explanation(tuple(lines))


def _notes_on(one: ExplainedParameter, param: Any, ndim: int, has_muon: bool) -> list[str]:
    """What looks wrong with a parameter, whose blocks have `ndim` axes."""
    embedding, head = (re.search(name, one.name, re.IGNORECASE) for name in (EMBEDDING, HEAD))
    notes = []
    if one.undeclared:
        notes.append("looks like a stack of layers, and each layer needs a norm of its own")
    if ndim < 2 and one.decayed:
        notes.append("has one axis, and is decayed: ~matching_kinds('bias', 'norm') leaves it out")
    if ndim < 2 and one.length == "trust ratio":
        notes.append("has one axis, and a trust ratio: its norm says little about its step")
    if one.matrices and (embedding or head):
        notes.append(
            "is an embedding or a head, which Adam moves in most recipes: matrix_mask, or "
            "embeddings= of planned_optimizer"
        )
    elif one.length == "sphere":
        notes += _notes_on_a_sphere(param, ndim, bool(embedding))
    if has_muon and ndim > 2 and one.direction == "adam":
        notes.append(
            f"has {ndim} axes, and is no matrix to Muon: matrix_axes says which are rows, as in "
            "{'query/kernel': 'layers rows heads columns'}"
        )
    return notes


def _notes_on_fused(name: str, shape: tuple[int, ...], stack: tuple[int, ...]) -> list[str]:
    """A question, if a matrix looks like several; `stack` are the stacked axes."""
    sides = [length for axis, length in enumerate(shape) if axis not in stack]
    three, two = (re.search(names, name, re.IGNORECASE) for names in (FUSED_3, FUSED_2))
    if len(sides) != 2 or not (three or two or max(sides) == 3 * min(sides)):
        return []
    number = 2 if two and not three else 3
    side = "columns" if sides[0] <= sides[1] else "rows"
    cut, hint = f"({number} {side})", f"or {number} times the heads in the place of {number}"
    if max(sides) % number:
        cut, hint = f"{side}=2048+512+512", "with the lengths of yours"
    words = iter(["rows", "columns"])
    one = " ".join("layers" if axis in stack else next(words) for axis in range(len(shape)))
    return [
        "may be several matrices side by side, as queries, keys and values or a gate and its input "
        f"often are. Say so: matrix_axes={{{name!r}: {one.replace(side, cut)!r}}}, {hint}; if it "
        f"is one, {one!r}"
    ]


def _notes_on_a_sphere(param: Any, ndim: int, is_embedding: bool) -> list[str]:
    """Why a parameter should not stay on a sphere."""
    is_known = not isinstance(param, jax.ShapeDtypeStruct | Tracer)
    if is_known and not np.any(np.asarray(param)):
        return ["starts at zero, and would stay there: its norm cannot change"]
    if ndim < 2:
        return ["has one axis: its norm could not change"]
    if is_embedding:
        return ["is an embedding: the norm of all its rows together could not change"]
    if jnp.finfo(param.dtype).bits < 32:
        return [f"is {param.dtype}: most of a step is rounded away without master_weights"]
    return []


def printable(text: str) -> str:
    """The text with escapes, as `repr` writes them, for characters that a terminal acts on."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _length(one: ExplainedParameter) -> str:
    """What sets the length of the steps: `3 x sphere` if the matrices share three norms."""
    share = one.length == "sphere" and one.blocks < sum(one.matrices.values())
    return f"{one.blocks} x sphere" if share else one.length or "-"


def _times(lengths: tuple[int, ...]) -> str:
    return "x".join(map(str, lengths))
