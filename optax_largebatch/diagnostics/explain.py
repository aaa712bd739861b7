"""Explains what an optimizer will do with each parameter, before the first step."""

from collections import Counter
from collections.abc import Iterator, Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from optax_largebatch.diagnostics.optimizer_facts import (
    Optimizer,
    facts_about,
    forgotten_stacks,
    relative_rates,
)
from optax_largebatch.params.blocks import Block
from optax_largebatch.params.likely_matrices import kernels_of_more_axes, line_of_axes
from optax_largebatch.params.likely_stacks import declaration
from optax_largebatch.params.names import is_called
from optax_largebatch.params.owners import owners
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.rules import WITHOUT_NAMES, are_numbers
from optax_largebatch.params.shapes import Shape, is_table
from optax_largebatch.sharding import optimizer_state_shardings

UNKNOWN = "?"
"""What is not known of parameters that only other libraries' transformations see."""


@dataclasses.dataclass(frozen=True)
class ExplainedParameter:
    """One line of an `Explanation`."""

    name: str
    shape: Shape
    blocks: int
    """The number of layers in the parameter, each with a norm of its own; 1 if it stacks none."""
    matrices: Mapping[tuple[int, int], int]
    """How many matrices of these rows and columns it has, if Muon moves it."""
    direction: str
    """Where its steps go: `"muon"`, `"adam"`, `"momentum"`, the names of transformations from
    elsewhere in a `chain`, or `"gradient"`; `"?"` if no transformation of this library sees it."""
    length: str
    """What sets the length of its steps: `"trust ratio"` for that of the parameter, `"sphere"` for
    steps that keep its norm, `"size"` for its root mean square; empty if it is the rate alone."""
    decayed: bool
    rate: float | None
    """The learning rate, in units of the largest of all; None if it is not known."""
    state_bytes: int
    """The bytes of its state on one device: moments, sums, masters."""
    notes: tuple[str, ...]
    """What looks wrong."""
    undeclared: str
    """If it looks like a stack of layers that is not declared, its entry in the argument of
    `stacked_layers`, such as `'layers/': 0`; otherwise empty."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`: print it, or read its `parameters`."""

    parameters: tuple[ExplainedParameter, ...]
    state_bytes: int
    """The bytes of the whole state on one device, with counters and trust ratios."""

    def __str__(self) -> str:
        head = ("parameter", "shape", "blocks", "direction", "length", "decay", "rate", "state", "")
        lines = [
            (
                printable(line.name),
                _times(line.shape) or "scalar",
                " + ".join(f"{number} of {_times(x)}" for x, number in line.matrices.items())
                or str(line.blocks),
                line.direction,
                _length(line),
                "yes" if line.decayed else UNKNOWN if line.direction == UNKNOWN else "-",
                UNKNOWN if line.rate is None else f"{line.rate:.3g}",
                f"{line.state_bytes / max(math.prod(line.shape), 1):.3g} B",
                "!" if line.notes else "",
            )
            for line in self.parameters
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (head, *lines)]
        return "\n".join([*rows, self.summary(), *self._notes()])

    def _notes(self) -> list[str]:
        """What the marks mean."""
        noted: dict[str, list[str]] = {}
        for line in self.parameters:
            for note in line.notes:
                noted.setdefault(note, []).append(printable(line.name))
        notes = [f"! {', '.join(names)}: {note}" for note, names in noted.items()]
        entries = [line.undeclared for line in self.parameters if line.undeclared]
        if entries:
            notes.append(f"  stacked={declaration(entries)}")
        if len(self.parameters) > 1 and are_numbers([line.name for line in self.parameters]):
            notes.append(f"! {WITHOUT_NAMES}")
        return notes

    def summary(self) -> str:
        """How many numbers go in which direction, and the bytes of their state."""
        sizes: Counter[str] = Counter()
        for line in self.parameters:
            mover = f"{line.direction}, {line.length}" if line.length else line.direction
            sizes[mover] += math.prod(line.shape)
        listed = "; ".join(f"{mover}: {size}" for mover, size in sizes.items())
        return (
            f"{len(self.parameters)} parameters, {sizes.total()} numbers ({listed})\n"
            f"{self.state_bytes:,} bytes of state on a device"
        )


def explain(optimizer: Optimizer, params: Any) -> Explanation:
    r"""Says of each parameter who moves it and how, and marks what looks wrong.

    For each parameter it prints its blocks (an array, or the layers of an array that stacks
    layers), the direction of its steps, what sets their length (`3 x sphere` if its matrices share
    three norms), whether it is decayed, its learning rate in units of the largest, and the bytes of
    state for each of its numbers: 8 for the two moments of Adam in float32, 4 for the one of Muon.
    It finds that in the optimizer, however it is wrapped. What other libraries' transformations
    move has a question mark. Bytes are those on one device, if the parameters lie on a mesh and
    the state as `optimizer_state_shardings` lays it.

    An exclamation mark stands by what is usually a mistake, and below the table by the reason:
    biases and scales of norms that are decayed, have a trust ratio or stay on a sphere; parameters
    on a sphere that have a low precision; embeddings and heads that Muon moves, or that stay on a
    sphere; kernels of three axes or more that are no matrices beside Muon; stacks of layers that
    are not declared.

    Args:
        optimizer: the optimizer, of this library or with one inside.
        params: the parameters, or their shapes from `jax.eval_shape` (with shardings, on a mesh).

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
        parameter      shape  blocks    direction  length  decay  rate   state
        embed          9x4    1         adam       -       -      0.231  8 B
        head           4x9    1         adam       sphere  -      1      8 B
        layers/bias    2x8    2         adam       -       -      0.231  8 B
        layers/kernel  2x4x8  2 of 4x8  muon       sphere  -      1      4 B
        4 parameters, 152 numbers (adam: 52; adam, sphere: 36; muon, sphere: 64)
        1,036 bytes of state on a device
    """
    facts = facts_about(optimizer, params)
    leaves = jax.tree.leaves(params)
    undeclared = {stack.number: stack.entry for stack in forgotten_stacks(facts, params)}
    rates = relative_rates([known.get("rate") for known in facts.of_each])
    of_state = _state_bytes(optimizer, params, facts.state)
    blocks = list(map(Block.of, leaf_names(params), map(np.shape, leaves), facts.axes))
    kernels = kernels_of_more_axes(blocks) if facts.has_muon else {}
    lines = []
    for number, (block, leaf, known) in enumerate(zip(blocks, leaves, facts.of_each, strict=True)):
        of_others = " + ".join(known.get("names", [UNKNOWN]))
        line = ExplainedParameter(
            block.name,
            np.shape(leaf),
            facts.blocks[number],
            known.get("matrices", {}),
            known.get("direction", of_others or "gradient"),
            known.get("length", ""),
            "decay" in known,
            rates[number],
            of_state[number],
            (),
            undeclared.get(number, ""),
        )
        notes = [*_notes_on(line, leaf, block)]
        if number in kernels and line.direction == "adam" and not line.undeclared:
            notes.append(
                f"has {len(block.shape)} axes, and is no matrix to Muon. If it is one, say which "
                f"axes are rows and columns: {line_of_axes((), {number: kernels[number]}, blocks)}"
            )
        if line.matrices and not known.get("by_text"):
            notes += _notes_on_fused(line, block)
        lines.append(dataclasses.replace(line, notes=tuple(notes)))
    return Explanation(tuple(lines), sum(of_state))


def _state_bytes(optimizer: Any, params: Any, state: Any) -> list[int]:
    """The bytes of a state on one device: of each parameter, and at last of all others."""
    leaves = jax.tree.leaves(params)
    arrays = jax.tree.leaves(state)
    shapes = [array.shape for array in arrays]
    shardings: list[Any] = [getattr(leaf, "sharding", None) for leaf in leaves]
    mesh: Any = next((x.mesh for x in shardings if isinstance(x, NamedSharding)), None)
    if mesh is not None:
        of_state = jax.tree.leaves(optimizer_state_shardings(optimizer, params, mesh))
        shapes = [x.shard_shape(shape) for x, shape in zip(of_state, shapes, strict=True)]
    sizes = [0] * (len(leaves) + 1)
    for owner, array, shape in zip(owners(state, params), arrays, shapes, strict=True):
        sizes[-1 if owner is None else owner] += array.dtype.itemsize * math.prod(shape)
    return sizes


def _notes_on(line: ExplainedParameter, param: Any, block: Block) -> Iterator[str]:
    """What looks wrong with a parameter."""
    is_embedding = is_table(line.name)
    if line.undeclared:
        yield "looks like a stack of layers, and each layer needs a norm of its own"
    if len(block.shape) < 2 and line.decayed:
        yield (
            "has one axis, and is decayed: ~matching_kinds('bias', 'norm', 'vector') leaves it out"
        )
    if len(block.shape) < 2 and line.length == "trust ratio":
        yield "has one axis, and a trust ratio: its norm says little about its step"
    if line.matrices and (is_embedding or is_called("head", line.name)):
        yield (
            "is an embedding or a head, which Adam moves in most recipes: matrix_mask, or "
            "embeddings= of planned_optimizer"
        )
    elif line.length == "sphere":
        if block.is_vector:
            yield "has one axis: its norm could not change"
        elif is_embedding:
            yield "is an embedding: the norm of all its rows together could not change"
        elif jnp.finfo(param.dtype).bits < 32:
            yield f"is {param.dtype}: most of a step is rounded away without master_weights"


def _notes_on_fused(line: ExplainedParameter, block: Block) -> Iterator[str]:
    """A question, if a matrix looks like several."""
    sides = block.shape
    three, two = (is_called(f"{number} matrices", line.name) for number in ("three", "two"))
    if len(sides) != 2 or not (three or two or max(sides) == 3 * min(sides)):
        return
    number = 2 if two and not three else 3
    words = ["rows", "columns"]
    if sides not in line.matrices:  # outputs first
        words.reverse()
    side = words[sides[0] <= sides[1]]
    cut = f"({number} {side})"
    hint = f"or {number} times the heads in the place of {number}"
    if max(sides) % number:
        cut = f"{side}=2048+512+512"
        hint = "with the lengths of yours"
    places = dict(zip(block.axes, words, strict=True))
    whole = " ".join(places.get(axis, "layers") for axis in range(len(line.shape)))
    yield (
        "may be several matrices side by side, as queries, keys and values or a gate and its input "
        f"often are. Say so: matrix_axes={{{line.name!r}: {whole.replace(side, cut)!r}}}, {hint}; "
        f"if it is one, {whole!r}"
    )


def printable(text: str) -> str:
    """The text with escapes, as `repr` writes them, for characters that a terminal acts on."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _length(line: ExplainedParameter) -> str:
    """What sets the length of the steps: `3 x sphere` if the matrices share three norms."""
    share = line.length == "sphere" and line.blocks < sum(line.matrices.values())
    return f"{line.blocks} x sphere" if share else line.length or "-"


def _times(lengths: Shape) -> str:
    return "x".join(map(str, lengths))
