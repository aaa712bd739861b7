"""The products of matrices in a compiled program."""

import math
import re

from benchmarks.compiled_step.program_text import ARRAY, Instruction, computations

CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONDITION = re.compile(r"condition=%?([\w.\-]+)")
CONSTANT = re.compile(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")


def operations(text: str) -> int:
    """The multiplications and additions of all products, loops by their number of turns."""
    found, entry = computations(text)
    constants = {name: int(value) for name, value in CONSTANT.findall(text)}
    known: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in known:
            types = {x.name: x.result for x in found[name]}
            known[name] = sum(_own(x, types) + _called(x) for x in found[name])
        return known[name]

    def _called(own: Instruction) -> int:
        inner = [x for x in CALLED.findall(own.attributes) if x in found]
        return (_turns(own) if own.kind == "while" else 1) * sum(map(of, inner))

    def _turns(loop: Instruction) -> int:
        """As the compiler says, or, on a TPU, the constant that the loop counts to."""
        if said := TURNS.search(loop.attributes):
            return int(said[1])
        condition = CONDITION.search(loop.attributes)
        ends = {
            constants[name]
            for own in (found[condition[1]] if condition else ())
            if own.kind == "compare" and "direction=LT" in own.attributes
            for name in own.operands
            if name in constants
        }
        if len(ends) != 1:
            raise ValueError(f"the turns of the loop {loop.name} cannot be read from the program.")
        return ends.pop()

    return of(entry)


def _own(own: Instruction, types: dict[str, str]) -> int:
    """The multiplications and additions of one instruction."""
    if own.kind not in ("dot", "convolution"):
        return 0
    left = _shape(types[own.operands[0]])
    if own.kind == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", own.attributes)
        summed = [int(axis) for axis in axes[1].split(",")] if axes else []
    else:  # a TPU's product; "f" is the axis that is summed over
        labels = re.search(r"dim_labels=(\w+)_", own.attributes)
        summed = [labels[1].index("f")] if labels else []
    return 2 * math.prod(_shape(own.result)) * math.prod(left[axis] for axis in summed)


def _shape(kind: str) -> list[int]:
    _, shape, _ = ARRAY.findall(kind)[0]
    return [int(n) for n in shape.split(",") if n]
