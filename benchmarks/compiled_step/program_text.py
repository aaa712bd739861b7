"""What the text of a compiled program says: kernels, their bytes, their order, what is sent."""

from collections.abc import Iterator
import itertools
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
NO_KERNELS = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"}
NO_KERNELS |= {"partition-id", "replica-id"}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
BRANCHES = re.compile(r"(?:true_computation|false_computation|body|to_apply)=%?([\w.\-]+)")


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    kind: str
    result: str
    """The type of the instruction's result."""
    operands: tuple[str, ...]
    attributes: str


class Cost(NamedTuple):
    """The cost of a computation."""

    kernels: int
    bytes: int
    """The bytes that kernels read from and write to the memory of the device."""


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation in their order, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    own: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            own = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif body := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
            own.append(_instruction(body[1], body[2]))
    return found, entry


def _instruction(name: str, rest: str) -> Instruction:
    result = _parenthesized(rest) if rest.startswith("(") else rest.split(" ", 1)[0]
    call = rest[len(result) + 1 :]
    kind = call.split("(", 1)[0]
    operands = _parenthesized(call[len(kind) :])
    names = tuple(re.findall(r"%([\w.\-]+)", operands))
    return Instruction(name, kind, result, names, call[len(kind) + len(operands) :])


def _parenthesized(text: str) -> str:
    """The beginning of a text, as far as its first parenthesis closes."""
    depth = 0
    for position, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[: position + 1]
    return text


def size(kind: str, anywhere: bool = False) -> int:
    """The bytes of all arrays in a type that lie in the memory of the device.

    Args:
        kind: the type.
        anywhere: whether to count those too that a TPU keeps on its chip.
    """
    return sum(
        BYTES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape, layout in ARRAY.findall(kind)
        if anywhere or "S(" not in layout
    )


class Program:
    """A compiled program.

    Args:
        text: what `jax.stages.Compiled.as_text()` returns.
    """

    def __init__(self, text: str):
        self._computations, self._entry = computations(text)
        self.collectives = {
            kind: number
            for kind in COLLECTIVES
            if (number := len(re.findall(rf" {kind}(?:-start)?\(", text)))
        }

    @property
    def largest_gathered(self) -> int:
        """The elements of the largest array that a device gets from an all-gather or all-reduce."""
        lengths = (
            [int(n) for n in shape.split(",") if n]
            for computation in self._computations.values()
            for own in computation
            if re.match(r"all-(gather|reduce)(-start)?$", own.kind)
            for _, shape, _ in ARRAY.findall(own.result)
        )
        return max(map(math.prod, lengths), default=0)

    def cost(self, computation: str | None = None, branch: bool = True) -> Cost:
        """The cost of a computation, of a loop one turn.

        Args:
            computation: its name; None for all of the program.
            branch: of a choice between several, whether the most expensive one is taken rather
                than the cheapest.
        """
        types: dict[str, str] = {}
        kernels = moved = 0
        for own in self._computations[computation or self._entry]:
            types[own.name] = own.result
            inner = [x for x in self._called(own) if x in self._computations]
            if inner:
                costs = [self.cost(x, branch) for x in inner]
                taken = (max if branch else min)(costs, key=lambda cost: cost.bytes)
                kernels, moved = kernels + taken.kernels, moved + taken.bytes
            elif own.kind not in NO_KERNELS and not own.kind.endswith("-done"):
                kernels += 1
                moved += _moved(own, types)
        return Cost(kernels, moved)

    def _called(self, own: Instruction) -> list[str]:
        """The computations that a loop, a choice or a call runs; a fusion is one kernel."""
        if own.kind == "conditional":
            several = re.search(r"branch_computations=\{([^}]*)\}", own.attributes)
            if several:
                return [x.strip().lstrip("%") for x in several[1].split(",")]
        if own.kind in ("conditional", "while", "call"):
            return BRANCHES.findall(own.attributes)
        return []

    def bytes_between_passes(self, least: int) -> Iterator[int]:
        """For passes over one gradient or parameter after each other, what others move meanwhile.

        Args:
            least: the bytes of an array, for smaller ones do not count.
        """
        kernels: list[int] = []
        read: dict[str, list[int]] = {}
        types: dict[str, str] = {}
        stands_for: dict[str, str] = {}
        for own in self._computations[self._entry]:
            types[own.name] = own.result
            if own.kind in ("bitcast", "get-tuple-element"):
                stands_for[own.name] = stands_for.get(own.operands[0], own.operands[0])
            if own.kind in NO_KERNELS or own.kind.endswith("-done"):
                continue
            for name in {stands_for.get(x, x) for x in own.operands}:
                if re.match(r"(params|gradients)_", name) and size(types[name], True) >= least:
                    read.setdefault(name.split("_", 1)[1].rsplit(".", 1)[0], []).append(
                        len(kernels)
                    )
            kernels.append(_moved(own, types))
        total = [0, *itertools.accumulate(kernels)]
        for passes in read.values():
            for first, second in itertools.pairwise(sorted(set(passes))):
                yield total[second] - total[first + 1]


def _moved(own: Instruction, types: dict[str, str]) -> int:
    """The bytes that an instruction reads from and writes to the memory of the device."""
    if own.kind.endswith("-start"):
        ends = [x for x in ARRAY.findall(own.result) if x[1]][:2]
        if len(ends) < 2:
            return 0
        least = min(size(f"{dtype}[{shape}]") for dtype, shape, _ in ends)
        return least * sum("S(" not in layout for *_, layout in ends)
    return size(own.result) + sum(size(types.get(x, "")) for x in set(own.operands))
