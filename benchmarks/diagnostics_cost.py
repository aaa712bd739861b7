"""What reading a run adds to a step of `lamb`, in the same run.

    python benchmarks/diagnostics_cost.py
    python benchmarks/diagnostics_cost.py --rounds 20 --output benchmarks/results

A step that is read has a `gradient_noise_scale` in its chain, which is measured at every step or at
every tenth, and returns, each time, besides parameters and state, the noise scale with its band and
the trust ratios, as one array. It is compared with the same step without all that:

- `update`: the optimizer's step alone, on the tree of BERT-base;
- `training step`: that of `training_step.py`, a network of 57 million parameters;
- `macro-batch`: the same in four micro-batches.

The small batches of the first two are those of two devices: one of them has the gradient of its own
examples and the mean, and reads both where it measures. There is one device here, so the sum over
the devices is a multiplication, and what is compared is what one device computes.

Steps are interleaved one by one and their times added up over ten steps, one of which is measured;
each such round is compared with the ten plain steps of the same round. The plain step is compared
with a copy of itself, too: what that says is noise. `bytes` are those that XLA counts in ten steps,
over those of ten plain ones; of a macro-batch they are not known. Writes `diagnostics_cost.csv`.
"""

import argparse
from collections.abc import Callable
import csv
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from machine import machine
import numpy as np
import optax
from step_cost import TREES, Running, arrays
from tqdm import tqdm
from training_step import WIDTHS, loss

import optax_largebatch as lb

PERIOD = 10
PLAIN, COPY = "plain", "plain again"
EVERY = {PLAIN: 0, COPY: 0, "each step": 1, "every tenth": PERIOD}
"""Steps from one that is measured to the next; 0 where nothing is read."""
MICRO_BATCHES = 4


class Given(NamedTuple):
    """What a step works on."""

    data: Any
    """A batch, or the gradients where only the optimizer runs."""
    own: Any
    """The gradients of one device's examples."""


Step = Callable[..., tuple[Any, Any]]
"""Takes optimizer, `every`, the number of the step, parameters, state and what is given."""


def small_batches(own: Any, mean: Any, params: Any, when: Any) -> lb.SmallBatches:
    """Those of two devices, as one of them computes them."""

    def on_device(_: jax.Array) -> lb.SmallBatches:
        return lb.small_batches_of_devices(own, params, "data", 32, mean=mean, when=when)

    both = jax.vmap(on_device, axis_name="data")(jnp.arange(2))
    return jax.tree.map(lambda x: x[0], both)


def updated(
    optimizer: Any, every: int, number: Any, params: Any, state: Any, given: Given
) -> tuple[Any, Any]:
    """A step of the optimizer alone; `given.data` are the gradients."""
    measured = {}
    if every:
        when = number % every == 0
        measured["small_batches"] = small_batches(given.own, given.data, params, when)
    updates, state = optimizer.update(given.data, state, params, **measured)
    return optax.apply_updates(params, updates), state


def trained(
    optimizer: Any, every: int, number: Any, params: Any, state: Any, given: Given
) -> tuple[Any, Any]:
    """A training step."""
    gradients = given._replace(data=jax.grad(loss)(params, given.data))
    return updated(optimizer, every, number, params, state, gradients)


def accumulated(
    optimizer: Any, every: int, number: Any, params: Any, state: Any, given: Given
) -> tuple[Any, Any]:
    """A training step in micro-batches; the optimizer takes their norms by itself."""
    del every, number  # the optimizer knows them
    for part in jnp.split(given.data, MICRO_BATCHES):
        updates, state = optimizer.update(jax.grad(loss)(params, part), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def prepare(step: Step, shapes: Any, given: Given, name: str) -> tuple[Running, float]:
    """A compiled step, and the bytes that XLA counts in it, the mean over ten steps."""
    every = EVERY[name]
    optimizer = lb.lamb(1e-3, weight_decay=0.01)
    if every:
        optimizer = lb.chain(lb.gradient_noise_scale(), optimizer)
    if step is accumulated:
        optimizer = lb.accumulate_gradients(optimizer, MICRO_BATCHES, small_batches=every or False)

    def readings(state: Any, params: Any) -> Any:
        """The noise scale and the trust ratios, if they are to be read."""
        if not every:
            return ()
        return lb.noise_scale(state), jnp.stack([*lb.trust_ratios(state, params).values()])

    def whole(params: Any, state: Any, given: Given, number: Any = None) -> tuple[Any, Any]:
        """A step; its number stands in the state, unless the compiler is to know it."""
        count, state, _ = state
        now = count if number is None else number
        params, state = step(optimizer, every, now, params, state, given)
        return params, (count + 1, state, readings(state, params))

    params = arrays(shapes)
    state = jax.jit(optimizer.init)(params)
    state = (jnp.int32(0), state, jax.jit(readings)(state, params))

    def compiled(number: int | None = None) -> Any:
        known = functools.partial(whole, number=number)
        return jax.jit(known, donate_argnums=(0, 1)).lower(params, state, given).compile()

    running = compiled()
    counted = running.cost_analysis()["bytes accessed"]
    if every > 1:  # XLA counts the branch that measures, which nine of ten steps skip
        measured, skipped = (compiled(n).cost_analysis()["bytes accessed"] for n in (0, 1))
        counted -= (measured - skipped) * (1 - 1 / every)
    return Running(running, params, state, given), counted


def measure(case: str, rounds: int, batch: int) -> list[dict[str, Any]]:
    """The ratios of one case to the plain step."""
    examples = jnp.asarray(np.random.default_rng(0).random((batch, WIDTHS[0]), "float32"))
    network = [{"kernel": shape, "bias": shape[1:]} for shape in itertools.pairwise(WIDTHS)]
    bert = TREES["bert-base"].shapes()
    cases: dict[str, tuple[Step, Any]] = {
        "update": (updated, bert),
        "training step": (trained, network),
        "macro-batch": (accumulated, network),
    }
    step, shapes = cases[case]
    given = Given(arrays(shapes) if case == "update" else examples, arrays(shapes))
    running, counted = {}, {}
    for name in tqdm(EVERY, desc=f"{case}: compiling"):
        running[name], counted[name] = prepare(step, shapes, given, name)
    names = list(EVERY)
    orders = np.random.default_rng(0)
    for own in running.values():  # the first step touches its memory for the first time
        own.run()
        own.seconds.clear()
    for _ in tqdm(range(rounds * PERIOD), desc=f"{case}: stepping"):
        for index in orders.permutation(len(names)):  # what runs after what must not matter
            running[names[index]].run()
    seconds = {
        name: np.reshape(own.seconds, (rounds, PERIOD)).sum(1) for name, own in running.items()
    }
    rows = []
    for name in names[1:]:
        low, median, high = np.quantile(seconds[name] / seconds[PLAIN], (0.1, 0.5, 0.9))
        figures = {"ratio": median, "ratio_low": low, "ratio_high": high}
        figures["ratio_of_all"] = seconds[name].sum() / seconds[PLAIN].sum()
        # Of a macro-batch XLA would count the step of `lamb` in each micro-batch.
        figures["bytes"] = counted[name] / counted[PLAIN] if case != "macro-batch" else np.nan
        rows.append(
            {"case": case, "step": name, "rounds": rounds}
            | {key: round(float(value), 4) for key, value in figures.items()}
            | {"machine": machine()}
        )
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cases = ("update", "training step", "macro-batch")
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10, help="of ten steps of each")
    parser.add_argument("--output", type=Path, default=Path("runs/diagnostics_cost"))
    args = parser.parse_args()
    rows = [row for case in args.case for row in measure(case, args.rounds, args.batch)]
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "diagnostics_cost.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(machine())
    for row in rows:
        print(
            f"{row['case']:<14} {row['step']:<12} {row['ratio']:.3f} x the plain step "
            f"({row['ratio_low']:.3f}..{row['ratio_high']:.3f}), of all steps together "
            f"{row['ratio_of_all']:.3f}, bytes {row['bytes']:.4f}"
        )


if __name__ == "__main__":
    main()
