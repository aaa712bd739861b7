"""The laws by which the numbers of a run follow its batch size and its length, as data.

Every law is one row. With the batch `k` times as large and `r` times the examples, a number moves
by powers of the two.
"""

from collections.abc import Mapping
import math
from typing import Any, Literal, NamedTuple, get_args

from optax_largebatch.arguments import check_integer, check_number, known_number
from optax_largebatch.plans.counts import LARGEST

DecayKind = Literal["decoupled", "independent", "l2", "rescaled"]
"""Weight decay that is multiplied by the learning rate, as in AdamW and Muon; that is multiplied by
the shape of its schedule alone, as in midGPT; that is a part of the loss; or of a step that norms
rescale, as in LAMB, LARS and on spheres."""

DECAY_KINDS: tuple[DecayKind, ...] = get_args(DecayKind)


class Moved(NamedTuple):
    """A number of the new run."""

    value: float
    why: str
    """The reason, in a few words."""


class Power(NamedTuple):
    """The factor `k**batch * r**length`."""

    batch: float = 0.0
    length: float = 0.0

    def factor(self, k: float, r: float) -> float:
        """The factor of a number that follows it."""
        return k**self.batch * r**self.length

    def words(self, r: float) -> str:
        """The factor in words; without the length of the run if that stays."""
        roots = {1.0: "k", 0.5: "sqrt(k)", 0.0: "", -0.5: "1/sqrt(k)"}
        parts = [roots.get(self.batch, f"k^{self.batch:g}")]
        parts += [f"r^{self.length:g}"] if self.length and r != 1 else []
        return " ".join(["times", *filter(None, parts)]) if any(parts) else "kept"


KEPT = Power()


class Law(NamedTuple):
    """How each number of a run moves; decay moves by its kind."""

    learning_rate: Power
    momentum: Power = KEPT
    """The power of `1 - b`, for `b1` and for `momentum`."""
    momentum_floor: float = 0.7
    """The least momentum that the law makes of a larger one."""
    b2: Power | Literal["half-life"] = "half-life"
    """The power of `1 - b2`; or `b2**k`, whose half-life in examples stays."""
    eps: Power = KEPT
    keeps_decay: bool = False
    """Whether the weight decay stays, whatever its kind."""
    highest_rate: float = float("inf")
    """The learning rate above which runs by the law ended more than 0.1 above a search."""
    keeps_warmup_steps: bool = False
    """Whether the warm-up keeps its steps; it is the same part of the run otherwise."""
    valid: str = ""
    """Where the law holds, or what is not known."""

    def moved(
        self,
        numbers: Mapping[str, float],
        kind: DecayKind,
        k: float,
        r: float,
    ) -> dict[str, Moved]:
        """The numbers of the new run; of learning rate and weight decay the factors."""
        rate = self.learning_rate
        return {
            "learning_rate": Moved(rate.factor(k, r), rate.words(r)),
            "weight_decay": self._decay(kind, k, r),
        } | {name: self._number(name, old, k, r) for name, old in numbers.items()}

    def _decay(self, kind: DecayKind, k: float, r: float) -> Moved:
        """The factor of the weight decay.

        Decoupled decay keeps its timescale `B / (rate decay)` as a part of the run, and independent
        decay `B / decay`.
        """
        if self.keeps_decay:
            return Moved(1.0, "kept")
        if kind == "decoupled":
            rate = self.learning_rate.factor(k, r)
            return Moved(k / (r * rate), "keeps B / (rate decay examples)")
        if kind == "independent":
            return Moved(k / r, "keeps B / (decay examples)")
        return Moved(1.0, {"l2": "a part of the loss", "rescaled": "norms rescale the step"}[kind])

    def _number(self, name: str, old: float, k: float, r: float) -> Moved:
        """A momentum, `b1`, `b2` or epsilon."""
        if name == "eps":
            return Moved(old * self.eps.factor(k, r), self.eps.words(r))
        power = self.momentum
        bounds = (self.momentum_floor, CEILING)
        if name == "b2":
            power = self.b2
            bounds = B2_BOUNDS
        if power == "half-life":
            return _within(old**k, old, *bounds, "same half-life in examples")
        factor = power.factor(k, r)
        moved = 1 - (1 - old) * factor if factor != 1 else old  # 1 - (1 - 0.1) is less than 0.1
        return _within(moved, old, *bounds, f"(1 - b) {power.words(r)}")


SPHERES = ("muonh", "adamh")
"""The optimizers whose matrices keep their norms, and whose rate is an angle."""
SHARE_OF_ADAM = 3 / 13
"""The rate of Adam in units of that angle, in Marin's runs."""

CEILING = 0.99
"""The largest momentum that a law makes of a smaller one, for batches that get smaller."""
B2_BOUNDS = (0.95, 0.9999)
"""Marin's runs were unsteady without the lower bound (marin-community/marin#2447)."""

_OURS = Law(
    learning_rate=Power(0.5, -0.32),
    momentum=Power(1.0, -0.5),
    eps=Power(-0.5, 0.5),
    valid="Valid below the critical batch size, for networks of the same width.",
)
# Rate: arXiv 1404.5997, 2603.28743 (length); momentum: arXiv 2603.15958; b2: arXiv 2507.07101;
# decay: arXiv 2405.13698.

LAWS: Mapping[str, Law] = {
    "adamw": _OURS._replace(highest_rate=0.08),
    "muon": _OURS._replace(highest_rate=0.15),
    "muonh": _OURS,
    "adamh": _OURS,
    "lamb": _OURS._replace(highest_rate=0.07),
    "lans": _OURS._replace(highest_rate=0.1),
    # arXiv 1404.5997
    "lars": Law(
        learning_rate=Power(0.5),
        valid="Valid below the critical batch size. Nobody measured its momentum.",
    ),
    # arXiv 1706.02677
    "sgd": Law(
        learning_rate=Power(1.0),
        valid="Valid for SGD with a warm-up, while the batch is well below the critical one: on "
        "ImageNet its authors saw it hold up to 8192, and accuracy fall from 16384 on.",
    ),
    # arXiv 1404.5997; karpathy/nanochat@92d63d4e scripts/base_train.py
    "sqrt": Law(
        learning_rate=Power(0.5),
        b2=KEPT,
        valid="Valid for optimizers that normalise the gradient, below the critical batch size.",
    ),
    "kept": Law(
        learning_rate=KEPT,
        b2=KEPT,
        keeps_decay=True,
        valid="All numbers are kept, to compare with.",
    ),
    # arXiv 2205.10287
    "adam_sde": Law(
        learning_rate=Power(0.5),
        momentum=Power(1.0),
        momentum_floor=0.6,
        b2=Power(1.0),
        eps=Power(-0.5),
        valid="Valid while the noise outweighs the gradient, and no b is at a bound.",
    ),
    # arXiv 1901.08256
    "legew": Law(
        learning_rate=Power(0.5),
        b2=KEPT,
        keeps_warmup_steps=True,
        valid="Valid for LARS and LAMB while the batch is below the critical one.",
    ),
    # arXiv 2507.07101
    "token_half_life": Law(
        learning_rate=KEPT,
        valid="The law concerns b2. The learning rate is kept, and yours to tune.",
    ),
    # marin-community/marin@6019f395 heuristic_muonh.py
    "marin": Law(
        learning_rate=Power(0.5, -0.395),
        eps=Power(-0.5, 0.5),
        valid="Fitted by Marin for MuonH and AdamH.",
    ),
}
"""A row for each family of optimizers, and those that others published."""


OWN_NUMBERS = ("learning_rate", "momentum", "b2", "eps")


def own_law(powers: Any) -> Law:
    """The row of an optimizer of your own, from the `law` of a `TunedRun`."""
    try:
        rows: dict[str, Any] = {name: Power(*both) for name, both in dict(powers).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"law must have a power of k and one of r for each number, got {powers!r}."
        ) from error
    if "learning_rate" not in rows or not rows.keys() <= set(OWN_NUMBERS):
        raise ValueError(
            f"law must have {OWN_NUMBERS[0]}, and may have {', '.join(OWN_NUMBERS[1:])}; got "
            f"{', '.join(map(repr, rows))}."
        )
    for name, power in rows.items():
        for x in power:
            check_number(f"law, {name}", x, "(-inf, inf)")
    return Law(**rows, valid="The law is your own: nobody here has measured it.")


def _within(
    moved: float,
    old: float,
    floor: float,
    ceiling: float,
    why: str,
) -> Moved:
    """A decay rate within its bounds.

    One that was beyond a bound before goes no further away from it, and comes back by the law.
    """
    if moved == old:
        return Moved(old, "kept")
    if moved < old <= floor or moved > old >= ceiling:
        name, bound = ("floor", floor) if moved < old else ("ceiling", ceiling)
        return Moved(old, f"kept: its {name} is {bound:g}")
    if moved < floor < old:
        return Moved(floor, f"{why}, at least {floor:g}")
    if moved > ceiling > old:
        return Moved(ceiling, f"{why}, at most {ceiling:g}")
    return Moved(moved, why)


def scale_batch_size(
    batch_size: int,
    *,
    run_length: float,
    power: float = 0.383,
) -> int:
    r"""The batch size for a shorter or longer run, by a power law.

    .. math:: B \to B\, r^{0.383}

    The best batch size of language models grew with the examples :math:`D` of the run as
    :math:`D^{0.383}`, whatever their size. nanochat takes the nearest power of two.

    Args:
        batch_size: a batch size that was good for the old run, 1 or more.
        run_length: the examples of the new run over those of the old one, positive.
        power: the power of `run_length`.

    Returns:
        The batch size for the new run, rounded; at least 1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import scale_batch_size
        >>> scale_batch_size(512, run_length=8)
        1135

    References:
        Bergsma et al., *Power Lines: Scaling Laws for Weight Decay and Batch Size in LLM
        Pre-training*, arXiv 2505.13738.
    """
    check_integer("batch_size", batch_size, at_least=1)
    run_length = known_number("run_length", run_length, "(0, inf)")
    power = known_number("power", power, "(-inf, inf)")
    try:
        scaled = batch_size * run_length**power
    except OverflowError:
        scaled = math.inf
    if scaled > LARGEST:
        raise ValueError(
            f"batch_size, run_length and power must give a batch size of at most {LARGEST}, got "
            f"{batch_size!r}, {run_length!r} and {power!r}."
        )
    return max(1, round(scaled))
