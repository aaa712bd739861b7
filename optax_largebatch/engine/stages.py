"""A function run in two stages, of which the first waits for some of the arguments only.

What a leaf program computes of norms alone, such as a trust ratio, is a few numbers for each leaf.
XLA computes them again for each use, each time in kernels of their own, unless they are known
before the arrays of the leaf are looked at.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

Between = list[jax.Array]
"""What the second stage takes over from the first."""


class Stages:
    """The stages of a function of three trees of arrays.

    Args:
        function: the function.
        shared: numbers that are computed with in both stages; what follows from them alone is
            the same for all leaves, and computed once.
        early: numbers from which the first stage computes what it can.
        late: the arrays that only the second stage looks at.
    """

    def __init__(
        self, function: Callable[[Any, Any, Any], Any], shared: Any, early: Any, late: Any
    ):
        closed, result = jax.make_jaxpr(function, return_shape=True)(shared, early, late)
        program = closed.jaxpr
        ends = len(jax.tree.leaves(shared)), len(jax.tree.leaves((shared, early)))
        known = {*program.constvars, *program.invars[: ends[1]]}
        follows = {*program.invars[ends[0] : ends[1]]}
        # What is larger, such as a number spread over a leaf, belongs to the kernels of the leaf.
        largest = max((x.size for x in jax.tree.leaves(early)), default=1)
        first, second = [], []
        for equation in program.eqns:
            inputs = {x for x in equation.invars if not isinstance(x, Literal)}
            if inputs <= known and all(x.aval.size <= largest for x in equation.outvars):
                first.append(equation)
                known |= {*equation.outvars}
                if inputs & follows:
                    follows |= {*equation.outvars}
                    continue
            second.append(equation)
        used = [*(x for equation in second for x in equation.invars), *program.outvars]
        own = {x for x in used if not isinstance(x, Literal)} & follows - {*program.invars}
        needed = [x for equation in first for x in equation.outvars if x in own]
        self._arguments = jax.tree.leaves((shared, early, late))
        self._result = jax.tree.structure(result)
        self._consts = closed.consts
        self._first = program.replace(eqns=first, outvars=needed)
        self._second = program.replace(eqns=second, constvars=[*program.constvars, *needed])

    def first(self) -> Between:
        """What can be computed of the early arguments, as far as the second stage needs it."""
        return jaxpr_as_fun(ClosedJaxpr(self._first, self._consts))(*self._arguments)

    def second(self, between: Between) -> Any:
        """The function's result."""
        rest = jaxpr_as_fun(ClosedJaxpr(self._second, [*self._consts, *between]))
        return self._result.unflatten(rest(*self._arguments))
