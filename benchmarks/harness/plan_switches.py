"""The switches of a plan of execution, off one at a time."""

from collections.abc import Iterator
import contextlib
from typing import Any

from optax_largebatch.engine import sums
from optax_largebatch.engine.execution_plans import ExecutionPlan

OFF: dict[str, Any] = {
    "sums": sums.plain,
    "serialize_groups": False,
    "smallest_first": False,
    "batch_identical": False,
    "batch_matrices": False,
    "batch_hoisted": False,
    "defer_state_writes": False,
    "fuse_reductions": False,
}
"""Each switch as it is when it is off. Those of a CPU are in `benchmarks.versions --without`."""


def switches_of(plan: ExecutionPlan) -> list[str]:
    """The switches of a plan that are on."""
    return [name for name, off in OFF.items() if getattr(plan, name) != off]


@contextlib.contextmanager
def without(plan: ExecutionPlan, name: str) -> Iterator[None]:
    """One switch off, of a plan that is frozen for everybody else."""
    before = getattr(plan, name) if name else None
    try:
        if name:
            object.__setattr__(plan, name, OFF[name])
        yield
    finally:
        if name:
            object.__setattr__(plan, name, before)
