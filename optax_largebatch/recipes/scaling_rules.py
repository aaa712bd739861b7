"""The rules of `scale_hyperparameters` as data: how each hyperparameter moves, and why.

A rule has the two powers of the learning rate, and a law for every other hyperparameter that it
moves. It keeps the rest.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Literal, NamedTuple

from optax_largebatch.plans.coupling import DecayKind

RuleName = Literal["linear", "sqrt", "adam_sde", "token_half_life", "legew", "muon", "hyperball"]

B1_FLOOR = 0.6
"""Where b1 stops under `adam_sde`: no published recipe with a large batch has a smaller one."""


class Change(NamedTuple):
    """What differs between the two runs."""

    k: float
    """The new batch size over the old one."""
    r: float
    """The examples of the new run over those of the old one."""
    rate: float
    """The new learning rate over the old one."""
    b2_floor: float
    b2_ceiling: float


class Moved(NamedTuple):
    """A hyperparameter of the new run."""

    value: float
    why: str
    """The reason, in at most 33 characters: a line of the account has 80 columns."""


Law = Callable[[float, Change], Moved]
"""Takes a hyperparameter of the old run to the new one."""


def _kept(why: str) -> Law:
    return lambda value, change: Moved(value, why)


def _within(moved: float, old: float, floor: float, ceiling: float, why: str) -> Moved:
    """A decay rate within its bounds. They do not move one that was outside before."""
    if moved < old <= floor:
        return Moved(old, f"not above its floor {floor:g}")
    if moved > old >= ceiling:
        return Moved(old, f"not below its ceiling {ceiling:g}")
    if moved < floor < old:
        return Moved(floor, f"no further down: floor {floor:g}")
    if moved > ceiling > old:
        return Moved(ceiling, f"no further up: ceiling {ceiling:g}")
    return Moved(moved, why)


def _b1_of_adam_sde(b1: float, change: Change) -> Moved:
    moved = b1 - (change.k - 1) * (1 - b1)
    return _within(moved, b1, B1_FLOOR, 1.0, "(1 - b1) times k")


def _b2_of_adam_sde(b2: float, change: Change) -> Moved:
    moved = b2 - (change.k - 1) * (1 - b2)
    return _within(moved, b2, change.b2_floor, change.b2_ceiling, "(1 - b2) times k")


def _same_half_life(b2: float, change: Change) -> Moved:
    why = "same half-life in examples"
    return _within(b2**change.k, b2, change.b2_floor, change.b2_ceiling, why)


def _eps_of_adam_sde(eps: float, change: Change) -> Moved:
    return Moved(eps / math.sqrt(change.k), "divided by sqrt(k)")


def _eps_by_root_of_steps(eps: float, change: Change) -> Moved:
    why = "divided by sqrt(k)" if change.r == 1 else "times sqrt(r / k)"
    return Moved(eps * math.sqrt(change.r / change.k), why)


def _same_part_of_the_run(steps: float, change: Change) -> Moved:
    moved = round(steps * change.r / change.k)
    if steps and not moved:
        return Moved(1, "no further down: one step")
    return Moved(moved, "the same part of the run")


def _r_times_the_examples(steps: float, change: Change) -> Moved:
    why = "as many examples" if change.r == 1 else "r times the examples"
    return Moved(max(1, round(steps * change.r / change.k)), why)


def _same_timescale(decay: float, change: Change) -> Moved:
    return Moved(decay * change.k / (change.r * change.rate), "keeps B / (rate decay examples)")


def _same_timescale_without_the_rate(decay: float, change: Change) -> Moved:
    return Moved(decay * change.k / change.r, "keeps B / (decay examples)")


NOT_MOVED = _kept("not part of the rule")

DECAYS: Mapping[DecayKind, Law] = {
    "decoupled": _same_timescale,
    "independent": _same_timescale_without_the_rate,
    "l2": _kept("L2 decay is part of the loss"),
    "rescaled": _kept("norms rescale the step"),
}
"""How weight decay moves, by its kind."""

LENGTHS: dict[str, Law] = {
    "warmup_steps": _same_part_of_the_run,
    "total_steps": _r_times_the_examples,
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

    def rate(self, k: float, r: float, length_power: float | None) -> Moved:
        """The factor of the learning rate."""
        power = self.length_power if length_power is None else length_power
        named = [_ROOTS[self.batch_power]] if self.batch_power else []
        named += [f"r^{power:g}"] if power and r != 1 else []
        why = f"times {' '.join(named)}" if named else "yours to tune"
        return Moved(k**self.batch_power * r**power, why)


_ROOTS = {1: "k", 0.5: "sqrt(k)"}
"""The powers of k in words."""


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
        "critical one. The decay rates are kept; from some size on shorter ones are better.",
    ),
    "adam_sde": ScalingRule(
        batch_power=0.5,
        moves={"b1": _b1_of_adam_sde, "b2": _b2_of_adam_sde, "eps": _eps_of_adam_sde},
        needs=("b1", "b2", "eps"),
        valid="Valid while the noise of the gradient outweighs the gradient, and no b is at a "
        "bound.",
    ),
    "token_half_life": ScalingRule(
        batch_power=0,
        moves={"b2": _same_half_life},
        needs=("b2",),
        valid="The rule concerns b2. The learning rate is kept, and yours to tune; if you multiply "
        "it, divide a decoupled weight decay by the same factor.",
    ),
    "legew": ScalingRule(
        batch_power=0.5,
        moves={"warmup_steps": _kept("k times the epochs")},
        decay_kind="rescaled",
        needs=("warmup_steps", "total_steps"),
        valid="Valid for LARS and LAMB while the batch is below the critical one, and at most "
        "until the warm-up, whose steps are kept, fills the run.",
    ),
    "muon": ScalingRule(
        batch_power=0.5,
        moves={"b2": _same_half_life, "eps": _eps_by_root_of_steps},
        valid="Valid for Muon and the Adam beside it while the batch is below the critical one, "
        "and for networks of the same width.",
    ),
    "hyperball": ScalingRule(
        batch_power=0.5,
        length_power=-0.32,
        moves={"b2": _same_half_life, "eps": _eps_by_root_of_steps},
        decay_kind="rescaled",
        valid="Valid for MuonH, AdamH and the Adam beside them while the batch is below the "
        "critical one, and for networks of the same width. What is on the sphere needs no decay.",
    ),
}
