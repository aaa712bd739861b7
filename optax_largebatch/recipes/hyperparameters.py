"""The hyperparameters that depend on the batch size."""

import dataclasses

from optax_largebatch.arguments import check_integer, known_number


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
