"""A run whose numbers are known, from which others are planned."""

from collections.abc import Mapping
import dataclasses
import math
import textwrap
from typing import Any, Literal

from optax_largebatch.arguments import check_choice, known_number
from optax_largebatch.plans.counts import Count, count, written
from optax_largebatch.plans.law import (
    DECAY_KINDS,
    LAWS,
    SHARE_OF_ADAM,
    SPHERES,
    DecayKind,
    Law,
    own_law,
)
from optax_largebatch.plans.planned_rate import PlannedRate, planned

Family = Literal["adamw", "muon", "muonh", "adamh", "lamb", "lans", "lars", "sgd"]
FROM_ADAMW: tuple[Family, ...] = ("muon", *SPHERES)
"""The optimizers whose numbers follow from those of AdamW."""

FAMILIES: Mapping[str, tuple[DecayKind, Mapping[str, float]]] = {
    "adamw": ("decoupled", {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "muon": ("decoupled", {"momentum": 0.95, "b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "muonh": ("rescaled", {"momentum": 0.95, "b1": 0.9, "b2": 0.95, "eps": 1e-8}),
    "adamh": ("rescaled", {"b1": 0.9, "b2": 0.95, "eps": 1e-8}),
    "lamb": ("rescaled", {"b1": 0.9, "b2": 0.999, "eps": 1e-6}),
    "lans": ("rescaled", {"b1": 0.9, "b2": 0.999, "eps": 1e-6}),
    "lars": ("rescaled", {"momentum": 0.9}),
    "sgd": ("l2", {"momentum": 0.9}),
}
"""The kind of weight decay that an optimizer has, and its other numbers if nobody gives them."""

NUMBERS = ("momentum", "b1", "b2", "eps")

SETTLED = 1.0
"""How far a decay has to shrink the weights over a run to balance their growth. On two networks
MuonH's best rates were those of 3 to 10, and up to 0.35 better than those of 0.3 to 1."""
FAR = 3.0
"""How many times the rate of AdamW, or which part of it, that of the rest is to be pointed out."""


@dataclasses.dataclass(frozen=True)
class TunedRun:
    r"""A run that works: its optimizer and its numbers at its batch size.

    `batch_plan` moves the numbers to another batch size, or to one that grows. Print the run to
    see what was given and what was assumed.

    Args:
        optimizer: `"adamw"`, `"muon"`, `"muonh"`, `"adamh"`, `"lamb"`, `"lans"`, `"lars"` or
            `"sgd"`. NAdam moves as AdamW. Any other name for an optimizer of your own, with `law`;
            it has those of the four last numbers that are given.
        batch_size: the examples in a step, for which the numbers are tuned.
        total: the examples of the run, or its tokens if plans count tokens; an integer, or a string
            such as `"100M"`.
        learning_rate: the learning rate over the run: a `PlannedRate`, a number from 0 to 1e10 for
            a constant rate, or a function of the examples (or tokens) seen.
        weight_decay: a number, or a schedule in the same form.
        decay_kind: `"decoupled"` for decay that is multiplied by the learning rate, as in
            `optax.adamw` and PyTorch. `"independent"`, where the parameters shrink by the decay
            itself or by its product with the shape of the schedule
            (`add_decayed_weights` after `scale(learning_rate)`), as in midGPT, big_vision and
            nanodo: 1e-4 there is a decoupled 0.1 at a rate of 1e-3. `"l2"`, which is added to the
            gradient, and `"rescaled"`, for LAMB and LARS. None for what the optimizer usually has.
        momentum: decay rate of the momentum of Muon, MuonH, LARS or SGD, in [0, 1). None for the
            default of the optimizer, as the next three.
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment, in [0, 1).
        eps: Adam's epsilon, 0 or more.
        law: how the numbers of your own optimizer move: for `"learning_rate"`, and for `"momentum"`
            (the power of `1 - b`, also of `b1`), `"b2"` and `"eps"` if they move, the powers of
            `k` and `r`, as in `{"learning_rate": (0.5, -0.32), "momentum": (1, -0.5)}`. Bounds are
            those of `batch_plan`.

    Raises:
        ValueError: an argument is out of its range, or the optimizer has no such number.

    Examples:
        >>> from optax_largebatch import PlannedRate, TunedRun
        >>> run = TunedRun(
        ...     "adamw", batch_size=512, total="51.2M", weight_decay=0.01, b1=0.9,
        ...     learning_rate=PlannedRate(3e-4, warmup="1M"))
        >>> print(run)
        adamw at batch 512, total 51.2M:
          learning_rate  0.0003, warm-up 1M, then cosine to 0
          weight_decay   0.01, decoupled (assumed)
          b1             0.9
          b2             0.999 (assumed)
          eps            1e-08 (assumed)
        >>> print(run.to("muonh").peak)
        0.0017320508075688772
    """

    optimizer: Family | str
    _: dataclasses.KW_ONLY
    batch_size: Count
    total: Count
    learning_rate: Any
    weight_decay: Any = 0.0
    decay_kind: DecayKind | None = None
    momentum: float | None = None
    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    law: Any = None
    note: str = ""
    """Where the numbers come from, if not from a search; the printed run has it."""

    def __post_init__(self) -> None:
        if self.law is None:
            check_choice("optimizer", self.optimizer, tuple(FAMILIES))
        elif self.optimizer in LAWS:
            raise ValueError(
                f"law must be None for {self.optimizer!r}, whose row is known; got {self.law!r}. "
                "Give your own optimizer another name."
            )
        if self.decay_kind is not None:
            check_choice("decay_kind", self.decay_kind, DECAY_KINDS)
        total = count("total", self.total, at_least=1)
        checked: dict[str, Any] = {
            "batch_size": count("batch_size", self.batch_size, at_least=1),
            "total": total,
            "learning_rate": planned("learning_rate", self.learning_rate, total),
            "weight_decay": planned("weight_decay", self.weight_decay, total),
        }
        if self.law is not None:
            row = own_law(self.law)
            checked["law"] = tuple((name, getattr(row, name)) for name in dict(self.law))
        known = self._usual[1]
        for name, value in self._given.items():
            if name not in known:
                raise ValueError(
                    f"{name} must be None for {self.optimizer!r}, which has {', '.join(known)}; "
                    f"got {value!r}."
                )
            checked[name] = known_number(name, value, "[0, inf)" if name == "eps" else "[0, 1)")
        if not isinstance(self.note, str):
            raise TypeError(f"note must be a string, got {self.note!r}.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def _given(self) -> dict[str, float]:
        """The momenta and epsilon that were given."""
        return {name: x for name in NUMBERS if (x := getattr(self, name)) is not None}

    @property
    def _usual(self) -> tuple[DecayKind, Mapping[str, float]]:
        """The entry of `FAMILIES`; an optimizer of your own has the numbers that are given."""
        return FAMILIES.get(self.optimizer, ("decoupled", self._given))

    @property
    def kind(self) -> DecayKind:
        """The kind of the weight decay, assumed if it was not given."""
        return self.decay_kind or self._usual[0]

    @property
    def numbers(self) -> dict[str, float]:
        """The momenta and epsilon, those of the optimizer if they were not given."""
        return {**self._usual[1], **self._given}

    @property
    def peak(self) -> float | None:
        """The largest learning rate, if it is known: that of a number or of a `PlannedRate`."""
        if isinstance(self.learning_rate, PlannedRate):
            return self.learning_rate.peak_value
        return None if callable(self.learning_rate) else self.learning_rate

    @property
    def known_peak(self) -> float:
        """The same, for what needs it."""
        if self.peak is None:
            raise ValueError(
                "learning_rate must be a number or a PlannedRate, whose peak is known; got "
                f"{self.learning_rate!r}."
            )
        return self.peak

    def with_peak(self, learning_rate: float) -> "TunedRun":
        """The run with another peak of the learning rate, in the same shape."""
        times = learning_rate / self.known_peak
        changed: Any = learning_rate
        if isinstance(rate := self.learning_rate, PlannedRate):
            end = rate.end_value * times
            changed = dataclasses.replace(rate, peak_value=learning_rate, end_value=end)
        return dataclasses.replace(self, learning_rate=changed)

    def to(self, optimizer: Family, *, sequence_length: int = 1) -> "TunedRun":
        r"""The run with MuonH, AdamH or Muon in the place of AdamW, at the same batch size.

        Once a decoupled decay has settled, a step of AdamW with the rate :math:`\eta` and the decay
        :math:`\lambda` turns the weights by about :math:`\sqrt{\eta \lambda}`. That angle is the
        rate of MuonH and AdamH. Muon with `consistent_rms=0.2` has steps as long as Adam's, and
        keeps both.

        Args:
            optimizer: `"muonh"`, `"adamh"` or `"muon"`, from `"adamw"`.
            sequence_length: the tokens of an example, if `total` counts tokens.

        Returns:
            The run; its `note` says how its rate was found, and when not to trust it.

        Raises:
            ValueError: there is no known way between the two optimizers.
        """
        check_choice("optimizer", optimizer, tuple(FAMILIES))
        if optimizer == self.optimizer:
            return self
        if self.optimizer != "adamw" or optimizer not in FROM_ADAMW:
            raise ValueError(
                f"optimizer must be {self.optimizer!r}, or one of {', '.join(FROM_ADAMW)} from "
                f"'adamw', got {optimizer!r}: nobody knows its numbers from those of "
                f"{self.optimizer}. Begin with those of a published recipe, see recipes.names()."
            )
        if optimizer == "muon":
            note = "Rate and decay are those of adamw: they are for muon's consistent_rms=0.2."
            return dataclasses.replace(self, optimizer="muon", note=note)
        rate = self.peak
        decay = self.weight_decay
        if rate is None or callable(decay) or self.kind != "decoupled" or not decay:
            raise ValueError(
                "weight_decay must be a decoupled one above 0, and learning_rate a number or a "
                f"PlannedRate, for the rate of {optimizer}, sqrt(rate x decay); got "
                f"{self.weight_decay!r} ({self.kind}) and {self.learning_rate!r}. Give "
                f"TunedRun({optimizer!r}, ...) with a rate of your own: published ones are 0.003 "
                "to 0.02."
            )
        angle = math.sqrt(rate * decay)
        tokens = int(self.batch_size) * count("sequence_length", sequence_length, at_least=1)
        steps = int(self.total) / tokens
        settled = rate * decay * steps
        doubt = (
            f"Do not trust it: the decay shrinks the weights by {settled:.2g} of their length over "
            f"the run, too little to settle. At {self.batch_size}, search from "
            f"{steps**-0.5:.2g} to {4 * steps**-0.5:.2g}. "
        )
        note = (
            "The rate is the angle of a step of adamw, sqrt(rate x decay). "
            f"{doubt if settled < SETTLED else ''}Adam moves the rest at {SHARE_OF_ADAM:.3g} of "
            f"it, without decay (adamw had {rate:.2g})."
        )
        if not 1 / FAR < (times := SHARE_OF_ADAM * angle / rate) < FAR:
            note += (
                f" That is {times:.2g} times as much. In small networks a quarter of 3/13 was "
                "worse, and four times no better; others= of planned_optimizer takes another rate."
            )
        same = self.with_peak(angle)
        return dataclasses.replace(
            same, optimizer=optimizer, weight_decay=0.0, decay_kind=None, note=note
        )

    def __str__(self) -> str:
        decay = _shown(self.weight_decay)
        if self.weight_decay != 0:
            decay += f", {self.kind}" + ("" if self.decay_kind else " (assumed)")
        constant = "" if callable(self.learning_rate) else ", constant"
        lines = {"learning_rate": _shown(self.learning_rate) + constant, "weight_decay": decay}
        lines |= {
            name: f"{value:g}" + (" (assumed)" if getattr(self, name) is None else "")
            for name, value in self.numbers.items()
        }
        return "\n".join(
            [
                f"{self.optimizer} at batch {self.batch_size}, total {written(int(self.total))}:",
                *(f"  {name:<13}  {line}" for name, line in lines.items()),
                *textwrap.wrap(self.note, 80, break_on_hyphens=False),
            ]
        )


def law_of(run: TunedRun, name: Any) -> Law:
    """The law of this name: a row of `LAWS`, or that of the run's own optimizer."""
    laws = LAWS if run.law is None else {**LAWS, run.optimizer: own_law(run.law)}
    check_choice("law", name, tuple(laws))
    return laws[name]


def _shown(value: Any) -> str:
    """A rate or a decay in words."""
    if not isinstance(value, PlannedRate):
        return "a schedule of its own" if callable(value) else f"{value:g}"
    warmup = f", warm-up {written(int(value.warmup))}" if value.warmup else ""
    hold = f", hold {written(int(value.hold))}" if value.hold else ""
    then = "constant" if value.decay == "constant" else f"{value.decay} to {value.end_value:g}"
    return f"{value.peak_value:g}{warmup}{hold}, then {then}"
