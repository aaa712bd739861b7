"""The rules of `scale_hyperparameters` as data: how each hyperparameter moves, and why.

A rule has the two powers of the learning rate, and a law for every other hyperparameter that it
moves. It keeps the rest.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Literal, NamedTuple

from optax_largebatch.arguments import check_integer, known_number
from optax_largebatch.plans.coupling import DecayKind

RuleName = Literal["linear", "sqrt", "adam_sde", "token_half_life", "legew", "muon", "hyperball"]

B1_FLOOR = 0.6
"""Where b1 stops under `adam_sde`: no published recipe with a large batch has a smaller one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters that depend on the batch size; None for those that a run does not have.

    Args:
        learning_rate: the peak of the schedule, positive.
        weight_decay: the factor of the parameters in a step, before the rate if the decay is
            multiplied by it; 0 or more.
        momentum: decay rate of the momentum of SGD, LARS or Muon, in [0, 1).
        b1: decay rate of Adam's first moment, in [0, 1).
        b2: decay rate of Adam's second moment, in [0, 1).
        eps: Adam's epsilon, 0 or more.
        warmup_steps: steps of the warm-up, 0 or more.
        total_steps: steps of the run, 1 or more.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
    """

    learning_rate: float
    weight_decay: float | None = None
    momentum: float | None = None
    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None

    def __post_init__(self) -> None:
        known_number("learning_rate", self.learning_rate, "(0, inf)")
        allowed = dict.fromkeys(("weight_decay", "eps"), "[0, inf)")
        allowed |= dict.fromkeys(("momentum", "b1", "b2"), "[0, 1)")
        for name, interval in allowed.items():
            if getattr(self, name) is not None:
                known_number(name, getattr(self, name), interval)
        for name, least in (("warmup_steps", 0), ("total_steps", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=least)


class Change(NamedTuple):
    """What differs between the two runs."""

    k: float
    """The new batch size over the old one."""
    r: float
    """The examples of the new run over those of the old one."""
    rate: float
    """The new learning rate over the old one."""


class Law(NamedTuple):
    """How a hyperparameter moves from the old run to the new one, and why."""

    why: str
    """At most 33 characters: a line of the account has 80 columns."""
    moved: Callable[[float, Change], float] = lambda value, change: value


def _steps(steps: float, change: Change) -> int:
    """No length vanishes."""
    return max(round(steps * change.r / change.k), min(int(steps), 1))


def _in_proportion(b: float, change: Change) -> float:
    return b - (change.k - 1) * (1 - b)


_SAME_HALF_LIFE = Law("same half-life in examples", lambda b2, change: b2**change.k)
_EPS_BY_ROOT_OF_STEPS = Law(
    "times sqrt(r / k)", lambda eps, change: eps * math.sqrt(change.r / change.k)
)

NOT_MOVED = Law("not part of the rule")

DECAYS: Mapping[DecayKind, Law] = {
    "decoupled": Law(
        "keeps B / (rate decay examples)",
        lambda decay, change: decay * change.k / (change.r * change.rate),
    ),
    "independent": Law(
        "keeps B / (decay examples)", lambda decay, change: decay * change.k / change.r
    ),
    "l2": Law("L2 decay is part of the loss"),
    "rescaled": Law("norms rescale the step"),
}
"""How weight decay moves, by its kind."""

LENGTHS = {
    "warmup_steps": Law("the same part of the run", _steps),
    "total_steps": Law("times r / k", _steps),
}
"""How steps move unless a rule says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingRule:
    """A rule: the learning rate times `k**batch_power * r**length_power`, and the other laws."""

    batch_power: float
    length_power: float = 0.0
    """Unless the caller gives one."""
    moves: dict[str, Law] = dataclasses.field(default_factory=dict)
    decay_kind: DecayKind = "decoupled"
    """The decay of the optimizers that the rule is for, unless the caller says otherwise."""
    needs: tuple[str, ...] = ()
    """The hyperparameters without which the rule makes no sense."""
    valid: str
    """Where the rule holds."""

    def rate(self, k: float, r: float, length_power: float | None) -> tuple[float, str]:
        """The factor of the learning rate, and the reason."""
        power = self.length_power if length_power is None else length_power
        powers = {0: [], 0.5: ["sqrt(k)"], 1: ["k"]}[self.batch_power]
        powers += [f"r^{power:g}"] if power and r != 1 else []
        why = f"times {' '.join(powers)}" if powers else "yours to tune"
        return k**self.batch_power * r**power, why


RULES: Mapping[str, ScalingRule] = {
    "linear": ScalingRule(
        batch_power=1,
        decay_kind="l2",
        valid="Valid for SGD with a warm-up, while the batch is well below the critical one: on "
        "ImageNet its authors saw it hold up to 8192, and accuracy fall from 16384 on.",
    ),
    "sqrt": ScalingRule(
        batch_power=0.5,
        valid="Valid for optimizers that normalise the gradient, while the batch is below the "
        "critical one. The decay rates are kept; MLPerf's BERT has b2 below 0.93 from 4608 on.",
    ),
    "adam_sde": ScalingRule(
        batch_power=0.5,
        moves={
            "b1": Law("(1 - b1) times k", _in_proportion),
            "b2": Law("(1 - b2) times k", _in_proportion),
            "eps": Law("divided by sqrt(k)", lambda eps, change: eps / math.sqrt(change.k)),
        },
        needs=("b1", "b2", "eps"),
        valid="Valid while the noise of the gradient outweighs the gradient, and no b is at a "
        "bound.",
    ),
    "token_half_life": ScalingRule(
        batch_power=0,
        moves={"b2": _SAME_HALF_LIFE},
        needs=("b2",),
        valid="The rule concerns b2. The learning rate is kept, and yours to tune; if you multiply "
        "it, divide a decoupled weight decay by the same factor.",
    ),
    "legew": ScalingRule(
        batch_power=0.5,
        moves={"warmup_steps": Law("k times the epochs")},
        decay_kind="rescaled",
        needs=("warmup_steps", "total_steps"),
        valid="Valid for LARS and LAMB while the batch is below the critical one, and at most "
        "until the warm-up, whose steps are kept, fills the run.",
    ),
    "muon": ScalingRule(
        batch_power=0.5,
        moves={"b2": _SAME_HALF_LIFE, "eps": _EPS_BY_ROOT_OF_STEPS},
        valid="Valid for Muon and the Adam beside it while the batch is below the critical one, "
        "and for networks of the same width.",
    ),
    "hyperball": ScalingRule(
        batch_power=0.5,
        length_power=-0.32,
        moves={"b2": _SAME_HALF_LIFE, "eps": _EPS_BY_ROOT_OF_STEPS},
        decay_kind="rescaled",
        valid="Valid for MuonH, AdamH and the Adam beside them while the batch is below the "
        "critical one, and for networks of the same width. What is on the sphere needs no decay.",
    ),
}
