"""The workloads: what is learned, to which target, and with which budget for every optimizer."""

from collections.abc import Callable, Iterator
import functools
from typing import Any, NamedTuple

from benchmarks.batch_size_curve import quadratic, training
from benchmarks.batch_size_curve.bert import Bert
from benchmarks.batch_size_curve.digits import Digits
from benchmarks.batch_size_curve.optimizers import OPTIMIZERS
from benchmarks.batch_size_curve.search import DECADES, WEIGHT_DECAYS
from benchmarks.batch_size_curve.training import Run

# The first are compared at all batch sizes before the others begin.
FIRST = ("adamw", "sgd", "lamb", "lans", "lars")
OTHERS = tuple(name for name in OPTIMIZERS if name not in FIRST)


class Workload(NamedTuple):
    """Something to learn. Every optimizer gets as many trials at every batch size, and as wide."""

    name: str
    title: str
    target: float
    """The loss to reach on the validation part."""
    batch_sizes: tuple[int, ...]
    optimizers: tuple[tuple[str, ...], ...]
    """One group after the other is run."""
    trials: int
    """Settings that are tried in every cell."""
    search_seeds: int
    """Runs of each of them; the slowest counts."""
    seeds: int
    """Runs of the best settings of a cell, with seeds that the search has not seen."""
    centre: Callable[[str], float]
    """The middle learning rate of an optimizer."""
    prepare: Callable[[float, str], Run]
    """From the target and an optimizer."""
    exact: Callable[[float], dict[str, tuple[float, float]]] = lambda target: {}
    """From the target: S_min and B_crit of the optimizers for which they are known."""

    @property
    def plan(self) -> dict[str, Any]:
        """What must not change when a sweep is continued."""
        names = [name for group in self.optimizers for name in group]
        return {
            "target": self.target,
            "trials": self.trials,
            "search_seeds": self.search_seeds,
            "seeds": self.seeds,
            "decades_of_learning_rate": DECADES,
            "weight_decays": list(WEIGHT_DECAYS),
            "batch_sizes": list(self.batch_sizes),
            "centres_of_learning_rate": {name: self.centre(name) for name in names},
        }

    def cells(self) -> Iterator[tuple[str, int]]:
        """Optimizers and batch sizes, in the order in which they are run."""
        for group in self.optimizers:
            for batch_size in self.batch_sizes:
                for optimizer in group:
                    yield optimizer, batch_size


@functools.cache
def _task(kind: type, target: float) -> training.Task:
    return kind(target)


def _learned(kind: type) -> Callable[[float, str], Run]:
    return lambda target, optimizer: training.prepare(_task(kind, target), optimizer)


def _centre(optimizer: str) -> float:
    return OPTIMIZERS[optimizer].centre


DIGITS = Workload(
    name="digits",
    title="digits, multilayer perceptron",
    target=0.2,
    batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
    optimizers=(FIRST, OTHERS),
    trials=12,
    search_seeds=3,
    seeds=5,
    centre=_centre,
    prepare=_learned(Digits),
)
BERT = Workload(
    name="bert",
    title="bytes of Python, small BERT",
    target=2.6,
    batch_sizes=(32, 128, 512, 2048),
    optimizers=(FIRST, OTHERS),
    trials=8,
    search_seeds=2,
    seeds=3,
    centre=_centre,
    prepare=_learned(Bert),
)
QUADRATIC = Workload(
    name="quadratic",
    title="noisy quadratic, exact",
    target=round(0.1 * float(quadratic.START), 4),
    batch_sizes=tuple(2**power for power in range(11)),
    optimizers=(tuple(quadratic.MOMENTA),),
    trials=64,
    search_seeds=1,
    seeds=1,
    centre=quadratic.CENTRES.__getitem__,
    prepare=quadratic.prepare,
    exact=quadratic.exact_fit,
)
WORKLOADS = {own.name: own for own in (DIGITS, BERT, QUADRATIC)}

# The same, for continuous integration: too few trials and seeds to say anything.
QUICK = {
    "quadratic": QUADRATIC._replace(batch_sizes=(1, 8, 64, 512), trials=24),
    "digits": DIGITS._replace(
        target=0.5, batch_sizes=(16, 128, 1024), optimizers=(("adamw", "lars"),), trials=4, seeds=2
    ),
    "bert": BERT._replace(
        target=3.3, batch_sizes=(32, 128), optimizers=(("lamb",),), trials=3, seeds=2
    ),
}
