"""Compiled steps of training, which can be timed."""

from collections.abc import Callable
import dataclasses
import time
from typing import Any

import jax
import optax

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""A step: from parameters, state and inputs to the next parameters and state."""


@dataclasses.dataclass
class Running:
    """A compiled step and its arrays."""

    compiled: jax.stages.Compiled
    params: Any
    state: Any
    given: Any
    """Gradients, or whatever else the step reads and leaves as it is."""
    trace_s: float
    compile_s: float

    def run(self) -> float:
        """Takes a step and returns how many seconds it took."""
        start = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, self.given)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def temporaries_bytes(self) -> int:
        """The bytes that the step allocates besides its arguments."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def bytes_accessed(self) -> float:
        """The bytes that XLA counts."""
        return self.compiled.cost_analysis()["bytes accessed"]


def start(step: Step, params: Any, state: Any, given: Any, **options: Any) -> Running:
    """Compiles a step. Parameters and state are donated, as in training; options are `jit`'s."""
    begun = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1), **options).lower(params, state, given)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    return Running(compiled, params, state, given, traced - begun, done - traced)


def updated(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    params: Any,
    state: Any,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """The parameters and the state after a step of the optimizer."""
    updates, state = optimizer.update(gradients, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def step_of(optimizer: optax.GradientTransformation) -> Step:
    """The step of an optimizer alone, from given gradients."""

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        return updated(optimizer, gradients, params, state)

    return step


def in_a_loop(step: Step, turns: int) -> Step:
    """A step that takes so many turns of another in one program, for which the host waits once."""

    def steps(params: Any, state: Any, given: Any) -> tuple[Any, Any]:
        def turn(index: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            # With the counter they are not known before the turn, so nothing leaves the loop.
            now, _ = jax.lax.optimization_barrier((given, index))
            return step(*carried, now)

        return jax.lax.fori_loop(0, turns, turn, (params, state))

    return steps


def start_update(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> Running:
    """A step of the optimizer alone, always with these gradients."""
    return start(step_of(optimizer), params, jax.jit(optimizer.init)(params), gradients)
