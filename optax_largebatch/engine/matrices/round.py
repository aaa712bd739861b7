"""A round of work on the matrices of leaves, and what a program asks for in it."""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

import jax

from optax_largebatch.engine.arrays import Known, LeafArrays, Scalars
from optax_largebatch.engine.compilation import merged_inside
from optax_largebatch.engine.matrices.exchange import Work
from optax_largebatch.engine.matrices.work import turns, worked_on
from optax_largebatch.engine.replay import Program


def work_on_matrices(
    programs: Mapping[int, Program],
    leaves: Mapping[int, LeafArrays],
    scalars: Scalars,
    known: Mapping[int, Known],
) -> dict[int, Known]:
    """What is known of leaves after work on their matrices, those of one shape at a time."""
    leaves, after = dict(leaves), {}
    on: dict[int, Any] = {
        i: program.rounds[len(known[i].answers)].on_matrices for i, program in programs.items()
    }
    one_pass = jax.jit(merged_inside(_stored_and_matrices), static_argnums=0)
    alike = turns({i: Work(leaves[i].gradient, (), x) for i, x in on.items()})
    for now, following in itertools.zip_longest(alike, alike[1:], fillvalue=[]):
        stored: dict[int, Sequence[jax.Array]] = {}
        asked: dict[int, Work] = {}
        for i in now:
            stored[i], array, numbers = one_pass(programs[i], leaves[i], scalars, known[i])
            asked[i] = Work(array, numbers, on[i])
        done, waiting = worked_on(asked, {i: leaves[i].gradient for i in following})
        after |= {i: known[i].after(stored[i], [x]) for i, x in done.items()}
        leaves |= {i: leaves[i]._replace(gradient=x) for i, x in waiting.items()}
    return after


def _stored_and_matrices(
    program: Program, leaf: LeafArrays, scalars: Scalars, known: Known
) -> tuple[Sequence[jax.Array], jax.Array, list[jax.Array]]:
    """What is stored before the round, the array whose matrices it works on, and numbers."""
    stop = program.run(leaf, scalars, known)
    request: Any = stop.request
    array, *numbers = request.given(leaf.dtype())
    return stop.stored, array, numbers
