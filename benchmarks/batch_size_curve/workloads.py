"""The workloads: the task, the target, and the budget for every optimizer."""

from collections.abc import Callable, Iterator
import functools
from typing import Any, NamedTuple

from benchmarks.batch_size_curve import quadratic, training
from benchmarks.batch_size_curve.bert import DEEP, LARGE, Bert
from benchmarks.batch_size_curve.digits import Digits
from benchmarks.batch_size_curve.optimizers import KNOWN, OPTIMIZERS
from benchmarks.batch_size_curve.search import DECADES, WEIGHT_DECAYS
from benchmarks.batch_size_curve.training import Run

# The first are compared at all batch sizes before the others begin.
FIRST = ("adamw", "sgd", "lamb", "lans", "lars")
OTHERS = tuple(name for name in KNOWN if name not in FIRST)
# The parts of LANS, and Muon.
PIECES = (
    "adamw",
    "nadamw",
    "lamb",
    "lans_without_nesterov",
    "lans_without_normalization",
    "lans_without_trust_ratio",
    "lans",
    "muon",
)
CONTROLS = tuple(name for name in PIECES if name not in FIRST)
MUONS = ("muon_with_trust_ratio", "muon_and_adamw", "muon_and_lamb")
MOMENTA = (
    "adamw_momentum_0.8",
    "adamw_momentum_0.95",
    "lamb_momentum_0.8",
    "lans_momentum_0.8",
    "muon_momentum_0.8",
)


class Workload(NamedTuple):
    """A task. At every batch size, all optimizers get as many trials over ranges as wide."""

    name: str
    title: str
    target: float
    """The loss to reach on the validation part."""
    batch_sizes: tuple[int, ...]
    optimizers: tuple[tuple[str, ...], ...]
    """Groups of optimizers, which are run one after the other."""
    trials: int
    """Settings that are tried in every cell."""
    search_seeds: int
    """Runs of each setting; the slowest counts."""
    seeds: int
    """Runs of the best settings of a cell, with seeds that the search has not seen."""
    centre: Callable[[str], float]
    """The middle learning rate of an optimizer."""
    prepare: Callable[[float, str], Run]
    """A function from the target and an optimizer to a `Run`."""
    fine_trials: int = 0
    """Settings around the best ones, with learning rates a factor of 1.26 apart."""
    exact: Callable[[float], dict[str, tuple[float, float]]] = lambda target: {}
    """S_min and B_crit, from the target, of the optimizers for which they are known."""

    @property
    def tried(self) -> int:
        """All settings that are tried in a cell."""
        return self.trials + self.fine_trials

    @property
    def measured(self) -> str:
        """What is counted, in words."""
        return f"steps to a validation loss of {self.target:g}"

    @property
    def has_curve(self) -> bool:
        """Whether there is a curve of steps against batch sizes."""
        return len(self.batch_sizes) > 2

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that must not change when a sweep is continued."""
        names = [name for group in self.optimizers for name in group]
        return {
            "target": self.target,
            "trials": self.trials,
            "fine_trials": self.fine_trials,
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
def _task(kind: Callable[[float], training.Task], target: float) -> training.Task:
    return kind(target)


def _learned(kind: Callable[[float], training.Task]) -> Callable[[float, str], Run]:
    return lambda target, optimizer: training.prepare(_task(kind, target), optimizer)


def _centre(optimizer: str) -> float:
    return OPTIMIZERS[optimizer].centre


DIGITS = Workload(
    name="digits",
    title="digits, multilayer perceptron",
    target=0.2,
    batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
    optimizers=(FIRST, OTHERS, CONTROLS, MOMENTA),
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
# The network and target of BERT, with finer rates and more seeds.
PIECES_OF_LANS = BERT._replace(
    name="bert_pieces",
    title="small BERT, LANS taken apart",
    batch_sizes=(32, 128, 512, 2048, 4096),
    optimizers=(PIECES, MUONS, MOMENTA),
    fine_trials=4,
    seeds=5,
)
# Layers in stacks: with a norm for each layer, and with one for all of them.
DEEP_BERT = PIECES_OF_LANS._replace(
    name="deep_bert",
    title="BERT of 8 layers, scanned",
    batch_sizes=(128,),
    optimizers=(("lamb", "lamb_one_norm", "lans", "lans_one_norm"),),
    prepare=_learned(functools.partial(Bert, sizes=DEEP)),
)
# For a GPU: it has never been run, and its target is a guess until somebody runs a pilot.
LARGE_BERT = PIECES_OF_LANS._replace(
    name="large_bert",
    title="BERT of 12 layers of width 512",
    target=1.2,
    batch_sizes=(512, 2048, 8192, 32768),
    optimizers=(("adamw", "nadamw", "lamb", "lans"), ("lamb_one_norm", "lans_one_norm")),
    prepare=_learned(functools.partial(Bert, sizes=LARGE)),
)
ON_A_CPU = {own.name: own for own in (DIGITS, BERT, QUADRATIC, PIECES_OF_LANS, DEEP_BERT)}
WORKLOADS = ON_A_CPU | {LARGE_BERT.name: LARGE_BERT}

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
