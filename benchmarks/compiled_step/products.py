"""The products of matrices in a compiled program."""

import math
import re

from benchmarks.compiled_step.program_text import ARRAY, Instruction, computations

CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONDITION = re.compile(r"condition=%?([\w.\-]+)")
CONSTANT = re.compile(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")


class Products:
    """The products of a compiled program.

    Args:
        text: what `jax.stages.Compiled.as_text()` returns.
    """

    def __init__(self, text: str):
        self._found, self._entry = computations(text)
        self._constants = {name: int(value) for name, value in CONSTANT.findall(text)}
        self._known: dict[str, int] = {}

    @property
    def operations(self) -> int:
        """The multiplications and additions of all products, loops by their number of turns."""
        return self._of_computation(self._entry)

    def during(self, kind: str) -> list[int]:
        """The multiplications and additions while each collective of a kind is under way.

        A device waits for one that has none. One that is not split into a start and an end is
        waited for.
        """
        entry = self._found[self._entry]
        own = self._of_each(entry)
        ends = {x.operands[0]: place for place, x in enumerate(entry) if x.kind == f"{kind}-done"}
        return [
            sum(own[place : ends.get(x.name, place)])
            for place, x in enumerate(entry)
            if x.kind in (kind, f"{kind}-start")
        ]

    def _of_computation(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = sum(self._of_each(self._found[name]))
        return self._known[name]

    def _of_each(self, computation: list[Instruction]) -> list[int]:
        """The operations of each instruction, with those of what it calls."""
        types = {x.name: x.result for x in computation}
        return [_own(x, types) + self._called(x) for x in computation]

    def _called(self, own: Instruction) -> int:
        inner = [x for x in CALLED.findall(own.attributes) if x in self._found]
        turns = self._turns(own) if own.kind == "while" else 1
        return turns * sum(map(self._of_computation, inner))

    def _turns(self, loop: Instruction) -> int:
        """As the compiler says, or, on a TPU, the constant that the loop counts to."""
        if said := TURNS.search(loop.attributes):
            return int(said[1])
        condition = CONDITION.search(loop.attributes)
        ends = {
            self._constants[name]
            for own in (self._found[condition[1]] if condition else ())
            if own.kind == "compare" and "direction=LT" in own.attributes
            for name in own.operands
            if name in self._constants
        }
        if len(ends) != 1:
            raise ValueError(f"the turns of the loop {loop.name} cannot be read from the program.")
        return ends.pop()


def _own(own: Instruction, types: dict[str, str]) -> int:
    """The multiplications and additions of one instruction."""
    in_cublas = own.kind == "custom-call" and "__cublas" in own.attributes
    if own.kind not in ("dot", "convolution") and not in_cublas:
        return 0
    left = _shape(types[own.operands[0]])
    if in_cublas:
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', own.attributes)
        summed = [int(axis) for axis in re.findall(r"\d+", axes[1])] if axes else []
    elif own.kind == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", own.attributes)
        summed = [int(axis) for axis in axes[1].split(",")] if axes else []
    else:  # a TPU's product; "f" is the axis that is summed over
        labels = re.search(r"dim_labels=(\w+)_", own.attributes)
        summed = [labels[1].index("f")] if labels else []
    return 2 * math.prod(_shape(own.result)) * math.prod(left[axis] for axis in summed)


def _shape(kind: str) -> list[int]:
    _, shape, _ = ARRAY.findall(kind)[0]
    return [int(n) for n in shape.split(",") if n]
