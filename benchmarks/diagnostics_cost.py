"""The cost that diagnostics add to a step of `lamb`, in the same run.

    python -m benchmarks.diagnostics_cost
    python -m benchmarks.diagnostics_cost --rounds 20 --output benchmarks/results

A step with diagnostics has a `measure_noise_scale` in its chain, which is measured at every step
or at every tenth. Besides parameters and state, it returns the noise scale with its band and the
trust ratios, as one array. It is compared with the same step without diagnostics:

- `update`: the optimizer's step alone, on the tree of BERT-base;
- `training step`: that of `training_step`, a network of 57 million parameters;
- `macro-batch`: the same in four micro-batches.

The small batches of the first two cases are those of two devices: a device has the gradient of its
own examples and the mean, and reads both where it measures. There is only one device here, so the
sum over devices is a multiplication, and the comparison is for the work of one device.

Steps are interleaved one by one, and their times are added up over ten steps, one of which is
measured. Each such round is compared with the ten plain steps of the same round. The plain step is
also compared with a copy of itself, which shows the noise. `bytes` are the bytes that XLA counts in
ten steps, divided by those of ten plain steps; for a macro-batch they are not known. Writes
`diagnostics_cost.csv`.
"""

import argparse
from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.harness.machine import machine
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import Running, start, updated
from benchmarks.harness.trees import TREES, arrays, perceptron
from benchmarks.harness.turns import in_turns, ratio
from benchmarks.training_step import WIDTHS, loss
import optax_largebatch as lb

PERIOD = 10
PLAIN, COPY = "plain", "plain again"
EVERY = {PLAIN: 0, COPY: 0, "each step": 1, "every tenth": PERIOD}
"""The steps from one measured step to the next; 0 without diagnostics."""
MICRO_BATCHES = 4


class Given(NamedTuple):
    """The inputs of a step."""

    data: Any
    """A batch, or the gradients where only the optimizer runs."""
    own: Any
    """The gradients of one device's examples."""


Step = Callable[..., tuple[Any, Any]]
"""A step, from optimizer, `every`, the number of the step, parameters, state and inputs."""


def small_batches(own: Any, mean: Any, params: Any, when: Any) -> lb.SmallBatches:
    """The small batches of two devices, as one of them computes them."""

    def on_device(_: jax.Array) -> lb.SmallBatches:
        return lb.small_batches_of_devices(
            own, params, axis_name="data", batch_size=32, mean=mean, when=when
        )

    both = jax.vmap(on_device, axis_name="data")(jnp.arange(2))
    return jax.tree.map(lambda x: x[0], both)


def stepped(
    optimizer: Any, every: int, number: Any, params: Any, state: Any, given: Given
) -> tuple[Any, Any]:
    """A step of the optimizer alone; `given.data` are the gradients."""
    measured = {}
    if every:
        when = number % every == 0
        measured["small_batches"] = small_batches(given.own, given.data, params, when)
    return updated(optimizer, given.data, params, state, **measured)


def trained(
    optimizer: Any, every: int, number: Any, params: Any, state: Any, given: Given
) -> tuple[Any, Any]:
    """A training step."""
    gradients = given._replace(data=jax.grad(loss)(params, given.data))
    return stepped(optimizer, every, number, params, state, gradients)


def accumulated(
    optimizer: Any, every: int, number: Any, params: Any, state: Any, given: Given
) -> tuple[Any, Any]:
    """A training step in micro-batches; the optimizer takes their norms by itself."""
    del every, number  # the optimizer knows them
    for part in jnp.split(given.data, MICRO_BATCHES):
        params, state = updated(optimizer, jax.grad(loss)(params, part), params, state)
    return params, state


def prepare(step: Step, shapes: Any, given: Given, name: str) -> tuple[Running, float]:
    """A compiled step, and the bytes that XLA counts in it, the mean over ten steps."""
    every = EVERY[name]
    optimizer = lb.lamb(1e-3, weight_decay=0.01)
    if every:
        optimizer = lb.chain(lb.measure_noise_scale(), optimizer)
    if step is accumulated:
        optimizer = lb.accumulate_gradients(
            optimizer, every=MICRO_BATCHES, small_batches=every or False
        )

    def readings(state: Any, params: Any) -> Any:
        """The noise scale and the trust ratios, if they are to be read."""
        if not every:
            return ()
        return lb.noise_scale(state), jnp.stack(
            [*lb.trust_ratios(optimizer, state, params).values()]
        )

    def whole(params: Any, state: Any, given: Given, number: Any = None) -> tuple[Any, Any]:
        """A step; its number stands in the state, unless the compiler is to know it."""
        count, state, _ = state
        now = count if number is None else number
        params, state = step(optimizer, every, now, params, state, given)
        return params, (count + 1, state, readings(state, params))

    params = arrays(shapes)
    state = jax.jit(optimizer.init)(params)
    state = (jnp.int32(0), state, jax.jit(readings)(state, params))

    running = start(whole, params, state, given)
    counted = running.bytes_accessed
    if every > 1:  # XLA counts the branch that measures, which nine of ten steps skip
        measured, skipped = (
            start(functools.partial(whole, number=n), params, state, given).bytes_accessed
            for n in (0, 1)
        )
        counted -= (measured - skipped) * (1 - 1 / every)
    return running, counted


def measure(case: str, rounds: int, batch: int) -> list[dict[str, Any]]:
    """The ratios of one case to the plain step."""
    examples = jnp.asarray(np.random.default_rng(0).random((batch, WIDTHS[0]), "float32"))
    network = perceptron(WIDTHS)
    bert = TREES["bert-base"].shapes()
    cases: dict[str, tuple[Step, Any]] = {
        "update": (stepped, bert),
        "training step": (trained, network),
        "macro-batch": (accumulated, network),
    }
    step, shapes = cases[case]
    given = Given(arrays(shapes) if case == "update" else examples, arrays(shapes))
    running, counted = {}, {}
    for name in tqdm(EVERY, desc=f"{case}: compiling"):
        running[name], counted[name] = prepare(step, shapes, given, name)
    steps = in_turns(running, rounds * PERIOD, shuffled=True, description=f"{case}: stepping")
    seconds = {name: np.reshape(own, (rounds, PERIOD)).sum(1) for name, own in steps.items()}
    rows = []
    for name in list(EVERY)[1:]:
        of_all = seconds[name].sum() / seconds[PLAIN].sum()
        # Of a macro-batch XLA would count the step of `lamb` in each micro-batch.
        counts = counted[name] / counted[PLAIN] if case != "macro-batch" else np.nan
        rows.append(
            {"case": case, "step": name, "rounds": rounds}
            | ratio(seconds[name], seconds[PLAIN]).as_row(4)
            | {"ratio_of_all": round(float(of_all), 4), "bytes": round(counts, 4)}
            | {"machine": machine()}
        )
    return rows


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cases = ("update", "training step", "macro-batch")
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10, help="of ten steps of each")
    add_output(parser, "diagnostics_cost")
    args = parser.parse_args()
    rows = [row for case in args.case for row in measure(case, args.rounds, args.batch)]
    report(rows, args.output / "diagnostics_cost.csv")


if __name__ == "__main__":
    main()
