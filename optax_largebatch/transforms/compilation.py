"""What this library asks of the compiler; all of it changes the speed and none of it a number."""

import contextlib
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def outlined() -> contextlib.AbstractContextManager[Any]:
    """Keeps XLA on a CPU from merging the jitted functions called here with what is around them.

    On an accelerator they stay open to the compiler, whose fusions are worth more there.
    """
    if jax.default_backend() == "cpu":
        return set_xla_metadata(inlineable="false")
    return contextlib.nullcontext()


def together(arrays: Any) -> Any:
    """The same tree of arrays, none of which is there before all of them are.

    So the compiler can combine the reductions that made them, whatever it finds to do for one of
    them in the meantime; and what is done with each of them is compiled alike.
    """
    with outlined():
        return _barrier(arrays)


_barrier = jax.jit(jax.lax.optimization_barrier)
