"""The workloads: a network, the batches of its runs, and the optimizers that train it."""

from collections.abc import Callable, Iterator, Mapping
import functools
from pathlib import Path
import runpy
from typing import Any, NamedTuple

from benchmarks.tuned import bert, causal
from benchmarks.tuned.arms import ARMS, Arm
from benchmarks.tuned.bert import Bert
from benchmarks.tuned.causal import CausalModel
from benchmarks.tuned.digits import Digits
from benchmarks.tuned.schedules import constant, ramps, written
from benchmarks.tuned.search import DECADES, MOMENTA, OFF, WEIGHT_DECAYS, Budget
from benchmarks.tuned.task import Task
import optax_largebatch as lb

HELD_OUT = 2048  # examples for validation, and as many for the test
# Those that the others are compared with.
REFERENCES = ("adamw", "muon", "muonh")


class Workload(NamedTuple):
    """A network and what is compared on it."""

    name: str
    title: str
    task: Callable[[], Task]
    plans: dict[str, lb.BatchPlan]
    """The batches of a run, by name."""
    optimizers: tuple[str, ...]
    order: tuple[str, ...]
    """The names of the plans in the order in which they are run."""
    around: tuple[str, ...] = ()
    """The plans with which other rates and decays are tried around the chosen ones."""
    is_ramp: bool = False
    """Whether plans are compared for each optimizer, and not optimizers for each plan."""
    budget: Budget = Budget()
    arms: Mapping[str, Arm] = ARMS
    """How each optimizer is built, by name."""
    laws: Mapping[str, Any] = {}
    """How the numbers of some move, as `law` of `lb.TunedRun`; of others by the law of MuonH."""

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that must not change when a sweep is continued."""
        return {
            "budget": self.budget._asdict(),
            "decades_of_learning_rate": DECADES,
            "weight_decays": [*WEIGHT_DECAYS, OFF],
            "momenta": list(MOMENTA),
            "batch_sizes": {name: written(plan) for name, plan in self.plans.items()},
            "centres_of_learning_rate": {name: self.arms[name].centre for name in self.optimizers},
        }

    def cells(self) -> Iterator[tuple[str, str]]:
        """Optimizers and names of plans, in the order in which they are run."""
        for batches in self.order:
            for optimizer in self.optimizers:
                yield optimizer, batches


def _network(kind: type[Bert], sizes: bert.Sizes) -> Callable[[], Bert]:
    return functools.cache(lambda: kind(sizes, HELD_OUT))


# What is new comes first in each group of batches: if the night ends early, it is there.
OPTIMIZERS = ("muonh", "muon", "adamw", "lans", "lamb")
SMALL_BERT = _network(Bert, bert.SMALL)
SMALL_CAUSAL = _network(CausalModel, causal.SMALL)
BERT = Workload(
    name="bert",
    title="small BERT",
    task=SMALL_BERT,
    plans=constant({32: 1024, 128: 384, 512: 128, 2048: 48}),
    optimizers=OPTIMIZERS,
    order=("512", "2048", "128", "32"),
    around=("512",),
)
# 20 tokens a parameter at the smallest batch.
CAUSAL = Workload(
    name="causal",
    title="small causal language model, scanned",
    task=SMALL_CAUSAL,
    plans=constant({32: 1640, 128: 448, 512: 128, 2048: 48}),
    optimizers=OPTIMIZERS,
    order=("512", "2048", "128", "32"),
    around=("512",),
)
BERT_RAMP = Workload(
    name="bert_ramp",
    title="small BERT, batches that grow",
    task=SMALL_BERT,
    plans=(of_the_ramp := ramps(128, 65_536)),
    optimizers=("muonh", "adamw"),
    order=tuple(of_the_ramp),
    is_ramp=True,
    budget=Budget(trials=16, finalists=3, again=1, finals=5),
)
CAUSAL_RAMP = BERT_RAMP._replace(
    name="causal_ramp",
    title="small causal language model, batches that grow",
    task=SMALL_CAUSAL,
    optimizers=("muonh",),
)
# Five times as long, so rates are lower: the peaks of MuonH are nearer to those of real runs.
CAUSAL_LONG = CAUSAL._replace(
    name="causal_long",
    title="small causal language model, long runs",
    task=_network(CausalModel, causal.SMALL._replace(micro_batch=16)),
    plans=constant({16: 8192, 128: 1024, 512: 256}),
    optimizers=("muonh",),
    order=("16", "128", "512"),
    around=(),
    budget=Budget(trials=16, finalists=3, again=1, finals=3),
    arms={"muonh": ARMS["muonh"]._replace(centre=0.03)},
)
# Neither a transformer nor a text. Rates are lower here, and so are the ranges.
DIGITS = Workload(
    name="digits",
    title="small convolutional network of images",
    task=functools.cache(Digits),
    plans=constant({16: 1536, 128: 256, 512: 96}),
    optimizers=OPTIMIZERS,
    order=("16", "128", "512"),
    budget=Budget(trials=16, finalists=3, again=1, finals=4),
    arms={
        name: ARMS[name]._replace(centre=centre)
        for name, centre in zip(OPTIMIZERS, (0.05, 0.02, 0.015, 0.03, 0.03), strict=True)
    },
)
ALL = (BERT, CAUSAL, BERT_RAMP, CAUSAL_RAMP, CAUSAL_LONG, DIGITS)
WORKLOADS = {workload.name: workload for workload in ALL}


def workloads_in(file: Path) -> dict[str, Workload]:
    """The workloads of a user's program, by name."""
    named = runpy.run_path(str(file)).values()
    return {own.name: own for own in named if isinstance(own, Workload)}


# The same, for continuous integration: too few runs and steps to say anything.
HASTY = Budget(trials=4, finalists=2, again=1, finals=3, around=2)
_SHORT = {"plans": constant({32: 16, 128: 8}), "order": ("32", "128"), "budget": HASTY}
QUICK = {
    "bert": BERT._replace(**_SHORT, optimizers=("muonh", "adamw"), around=("32",)),
    "causal": CAUSAL._replace(
        plans=constant({32: 16}), order=("32",), budget=HASTY, optimizers=("muonh",), around=()
    ),
    "bert_ramp": BERT_RAMP._replace(plans=ramps(32, 1024), optimizers=("muonh",), budget=HASTY),
}
