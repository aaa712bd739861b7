r"""Whether MuonH needs the clipping of AdamW: a small language model, with and without bad batches.

    python -m benchmarks.clipping

Batch, settings and seeds are those of the search of `benchmarks.tuned`. "Clipped" is the global
norm at 1.0, before everything. In a run with bad batches every tenth gradient is noise with a norm
of 100. Prints test losses: the mean over three seeds, and their range. Takes ten minutes of a CPU.
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness.pages import markdown
from benchmarks.tuned.arms import ARMS, Arm
from benchmarks.tuned.results import measured
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.training import compiled
from benchmarks.tuned.workloads import CAUSAL
import optax_largebatch as lb

EVERY, NORM = 10, 100.0


def with_bad_batches() -> optax.GradientTransformation:
    """Puts noise of a large norm in the place of some gradients."""

    def update(gradients: Any, step: Any, params: Any = None) -> tuple[Any, Any]:
        noise = optax.tree.random_like(jax.random.key(step), gradients)
        bad = optax.tree.scale(NORM / optax.tree.norm(noise), noise)
        is_bad = step % EVERY == EVERY - 1
        return jax.tree.map(lambda x, y: jnp.where(is_bad, x, y), bad, gradients), step + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def arm(optimizer: str, bad: bool, clipped: bool) -> Arm:
    """The optimizer behind what is done to its gradients."""
    before = [with_bad_batches()] * bad + [lb.clip_by_global_norm(1.0)] * clipped
    return Arm(0, lambda *schedules: optax.chain(*before, ARMS[optimizer].build(*schedules)))


def main() -> None:
    """Runs everything, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", default="512", choices=CAUSAL.plans)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    results = measured(CAUSAL, committed(CAUSAL))
    seeds = CAUSAL.budget.final_seeds[: args.seeds]
    lines = []
    for optimizer, bad in itertools.product(("adamw", "muonh"), (False, True)):
        jobs = [(results[optimizer][args.batch].settings, seed) for seed in seeds]
        losses = [
            [x.test for x in compiled(CAUSAL.task(), arm(optimizer, bad, clipped), 1)(
                CAUSAL.plans[args.batch], jobs)]
            for clipped in (False, True)
        ]  # fmt: skip
        means = [f"{np.mean(x):.3f} ({np.ptp(x):.3f})" for x in losses]
        lines.append((f"`{optimizer}`", "every tenth" if bad else "none", *means))
        print(lines[-1], flush=True)
    print(markdown(("", "bad batches", "not clipped", "clipped at 1.0"), lines))


if __name__ == "__main__":
    main()
