"""Rules that scale hyperparameters from one batch size to another."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, Literal, NamedTuple

from optax_largebatch.arguments import check_choice, check_integer, check_number

Rule = Literal["linear", "sqrt", "adam_sde", "token_half_life", "legew"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters that depend on the batch size; None for those that a run does not have.

    Args:
        learning_rate: the peak of the schedule, positive.
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment, in [0, 1).
        eps: Adam's epsilon, 0 or more.
        warmup_steps: steps of the warm-up, 0 or more.
        total_steps: steps of the run, 1 or more.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
    """

    learning_rate: float
    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, "(0, inf)")
        for name, allowed in (("b1", "[0, 1)"), ("b2", "[0, 1)"), ("eps", "[0, inf)")):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), allowed)
        for name, least in (("warmup_steps", 0), ("total_steps", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=least)


class ScaledHyperparameters(NamedTuple):
    """The result of `scale_hyperparameters`; print it to read the account."""

    settings: Hyperparameters
    """The hyperparameters for the new batch size."""
    account: str
    """The changes in words, and the limit up to which the rule is valid."""

    def __str__(self) -> str:
        return self.account


def scale_hyperparameters(
    settings: Hyperparameters, from_batch: int, to_batch: int, rule: Rule
) -> ScaledHyperparameters:
    r"""Scales hyperparameters from one batch size to another, by a rule.

    With :math:`k` the new batch size over the old one:

    .. math::

        \begin{array}{ll}
        \text{linear} & \eta \to k \eta \\
        \text{sqrt} & \eta \to \sqrt{k}\, \eta \\
        \text{adam\_sde} & \eta \to \sqrt{k}\, \eta, \quad 1 - b \to k (1 - b), \quad
            \epsilon \to \epsilon / \sqrt{k} \\
        \text{token\_half\_life} & b_2 \to b_2^k \\
        \text{legew} & \eta \to \sqrt{k}\, \eta, \quad \text{warm-up epochs} \to k
            \text{ times as many}
        \end{array}

    The run sees as many examples as before, so it has :math:`1/k` of the steps. The warm-up is
    shortened in the same way, except under `legew`, where it keeps its steps. A rule keeps the
    hyperparameters that it does not name. No rule here changes weight decay.

    Args:
        settings: the hyperparameters at `from_batch`.
        from_batch: the batch size of `settings`, 1 or more.
        to_batch: the batch size that is wanted, 1 or more; smaller is allowed.
        rule: `"linear"` for SGD; `"sqrt"` for Adam, LAMB and LARS; `"adam_sde"` for Adam with its
            decay rates; `"token_half_life"` for the decay rate of the second moment alone;
            `"legew"` for LARS and LAMB with the warm-up.

    Returns:
        `settings` for the new batch size, and an `account` in words: print it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, a hyperparameter that the rule needs is None,
            or the result is invalid: a decay rate below 0, or a warm-up longer than the run.

    Examples:
        >>> from optax_largebatch import Hyperparameters, scale_hyperparameters
        >>> adam = Hyperparameters(
        ...     learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, warmup_steps=800, total_steps=8000)
        >>> scaled = scale_hyperparameters(adam, from_batch=256, to_batch=1024, rule="adam_sde")
        >>> print(scaled.settings.learning_rate, round(scaled.settings.b1, 3))
        0.002 0.6
        >>> print(scaled)
        adam_sde, batch size 256 to 1024 (k = 4):
          learning_rate  0.001 -> 0.002
          b1             0.9 -> 0.6
          b2             0.999 -> 0.996
          eps            1e-08 -> 5e-09
          warmup_steps   800 -> 200
          total_steps    8000 -> 2000
        Valid while the noise of the gradient outweighs the gradient, and every b stays well
        above 0: no further than a batch size of 2560, and better well before.

    References:
        linear: Goyal et al., *Accurate, Large Minibatch SGD*, arXiv 1706.02677. sqrt: Krizhevsky,
        *One weird trick for parallelizing convolutional neural networks*, arXiv 1404.5997.
        adam_sde: Malladi et al., *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*,
        arXiv 2205.10287. token_half_life: Marek et al., *Small Batch Size Training for Language
        Models*, arXiv 2507.07101. legew: You et al., *Large-Batch Training for LSTM and Beyond*,
        arXiv 1901.08256.
    """
    if not isinstance(settings, Hyperparameters):
        raise TypeError(
            f"settings must be Hyperparameters(learning_rate=..., ...), got {settings!r} of type "
            f"{type(settings).__name__}."
        )
    check_integer("from_batch", from_batch, at_least=1)
    check_integer("to_batch", to_batch, at_least=1)
    check_choice("rule", rule, tuple(RULES))
    scaled = RULES[rule](settings, from_batch, to_batch)
    return ScaledHyperparameters(scaled, _account(settings, scaled, rule, from_batch, to_batch))


def _linear(old: Hyperparameters, from_batch: int, to_batch: int) -> Hyperparameters:
    k = to_batch / from_batch
    return _same_examples(old, k, learning_rate=old.learning_rate * k)


def _sqrt(old: Hyperparameters, from_batch: int, to_batch: int) -> Hyperparameters:
    k = to_batch / from_batch
    return _same_examples(old, k, learning_rate=old.learning_rate * math.sqrt(k))


def _adam_sde(old: Hyperparameters, from_batch: int, to_batch: int) -> Hyperparameters:
    k = to_batch / from_batch
    rates = {}
    for name in ("b1", "b2"):
        b = _given(old, name, "adam_sde")
        rates[name] = max(1 - k * (1 - b), 0.0)
        if to_batch > _largest_batch(b, from_batch):
            raise ValueError(
                f"to_batch must be at most {_largest_batch(b, from_batch)} for "
                f"settings.{name} = {b!r} under the rule 'adam_sde', got {to_batch}: "
                f"1 - k (1 - {name}) is {1 - k * (1 - b):.4g}, and a decay rate is no less than 0. "
                f"The rule ends there. Take a smaller batch, or 'sqrt' and tune {name}."
            )
    rate = old.learning_rate * math.sqrt(k)
    eps = _given(old, "eps", "adam_sde") / math.sqrt(k)
    return _same_examples(old, k, learning_rate=rate, eps=eps, **rates)


def _token_half_life(old: Hyperparameters, from_batch: int, to_batch: int) -> Hyperparameters:
    k = to_batch / from_batch
    return _same_examples(old, k, b2=_given(old, "b2", "token_half_life") ** k)


def _legew(old: Hyperparameters, from_batch: int, to_batch: int) -> Hyperparameters:
    # k times the epochs, each of 1/k of the steps.
    warmup = _given(old, "warmup_steps", "legew")
    total = max(1, round(_given(old, "total_steps", "legew") * from_batch / to_batch))
    if warmup >= total:
        raise ValueError(
            f"settings.warmup_steps must be less than the {total} steps of the run at batch size "
            f"{to_batch}, got {warmup!r}: under the rule 'legew' the warm-up keeps its steps while "
            f"the run loses them. Take a smaller to_batch, or the rule 'sqrt'."
        )
    return dataclasses.replace(_sqrt(old, from_batch, to_batch), warmup_steps=warmup)


RULES: dict[str, Callable[[Hyperparameters, int, int], Hyperparameters]] = {
    "linear": _linear,
    "sqrt": _sqrt,
    "adam_sde": _adam_sde,
    "token_half_life": _token_half_life,
    "legew": _legew,
}

_VALIDITY = {
    "linear": (
        "Valid for SGD with a warm-up, while the batch is well below the critical one: on\n"
        "ImageNet its authors saw it hold up to 8192, and accuracy fall from 16384 on."
    ),
    "sqrt": (
        "Valid for optimizers that normalise the gradient, while the batch is below the\n"
        "critical one. The decay rates are kept; from some size on shorter ones are better."
    ),
    "adam_sde": (
        "Valid while the noise of the gradient outweighs the gradient, and every b stays well\n"
        "above 0: no further than a batch size of {limit}, and better well before."
    ),
    "token_half_life": (
        "It concerns b2 alone: the learning rate is kept, and to be tuned. Towards large\n"
        "batches b2 tends to 0, where the second moment remembers no step but the last."
    ),
    "legew": (
        "Valid for LARS and LAMB while the batch is below the critical one, and at most until the\n"
        "warm-up, whose steps are kept, fills the run."
    ),
}


def _account(
    old: Hyperparameters, new: Hyperparameters, rule: str, from_batch: int, to_batch: int
) -> str:
    lines = [f"{rule}, batch size {from_batch} to {to_batch} (k = {to_batch / from_batch:g}):"]
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before is not None:
            change = "  (kept)" if before == after else f" -> {_shown(after)}"
            lines.append(f"  {field.name:<13}  {_shown(before)}{change}")
    limit = ""
    if old.b1 is not None and old.b2 is not None:
        limit = _largest_batch(min(old.b1, old.b2), from_batch)
    return "\n".join([*lines, _VALIDITY[rule].format(limit=limit)])


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _given(settings: Hyperparameters, name: str, rule: str) -> Any:
    value = getattr(settings, name)
    if value is None:
        raise ValueError(f"settings.{name} must be given for the rule {rule!r}, got None.")
    return value


def _same_examples(old: Hyperparameters, k: float, **changed: Any) -> Hyperparameters:
    """`old` with the changes of the rule, for as many examples as before."""
    steps: dict[str, int] = {}
    if old.total_steps is not None:
        steps["total_steps"] = max(1, round(old.total_steps / k))
    if old.warmup_steps is not None:
        steps["warmup_steps"] = round(old.warmup_steps / k)
    return dataclasses.replace(old, **(steps | changed))


def _largest_batch(b: float, from_batch: int) -> int:
    """The largest batch size at which `1 - k (1 - b)` is no less than 0."""
    return math.floor(from_batch / (1 - b) * (1 + 1e-12))
