"""Hyperparameters from one batch size, and one length of the run, to another."""

import math
import textwrap
from typing import Any, NamedTuple

from optax_largebatch import arguments
from optax_largebatch.diagnostics.critical_batch_size import CriticalBatchSize
from optax_largebatch.diagnostics.noise_scale import NoiseScale
from optax_largebatch.plans.coupling import DecayKind
from optax_largebatch.recipes import scaling_rules
from optax_largebatch.recipes.scaling_rules import RULES, Hyperparameters, Law, RuleName


class ScaledHyperparameters(NamedTuple):
    """The result of `scale_hyperparameters`; print it to read the account."""

    settings: Hyperparameters
    """The hyperparameters of the new run."""
    account: str
    """What changed and why, and the limit up to which the rule is valid; 80 columns wide."""

    def __str__(self) -> str:
        return self.account


def scale_hyperparameters(
    settings: Hyperparameters,
    *,
    from_batch: int,
    to_batch: int,
    rule: RuleName,
    run_length: float = 1.0,
    length_power: float | None = None,
    decay_kind: DecayKind | None = None,
    b2_floor: float = 0.95,
    b2_ceiling: float = 0.9999,
    noise_scale: float | NoiseScale | CriticalBatchSize | None = None,
) -> ScaledHyperparameters:
    r"""Scales hyperparameters from one batch size to another, by a rule.

    With :math:`k` the new batch size over the old one, :math:`r` the examples of the new run over
    those of the old one, and :math:`p` the `length_power`:

    .. math::

        \begin{array}{ll}
        \text{linear} & \eta \to k\, r^p \eta \\
        \text{sqrt} & \eta \to \sqrt{k}\, r^p \eta \\
        \text{adam\_sde} & \text{as sqrt}, \quad 1 - b \to k (1 - b), \quad
            \epsilon \to \epsilon / \sqrt{k} \\
        \text{token\_half\_life} & \eta \to r^p \eta, \quad b_2 \to b_2^k \\
        \text{legew} & \text{as sqrt}, \quad \text{warm-up epochs} \to k \text{ times as many} \\
        \text{muon} & \text{as sqrt}, \quad b_2 \to b_2^k, \quad
            \epsilon \to \sqrt{r / k}\, \epsilon \\
        \text{hyperball} & \text{as muon, with } p = -0.32
        \end{array}

    The new run has :math:`r / k` times the steps, and so has its warm-up, except under `legew`,
    where the warm-up keeps its steps. A rule keeps the hyperparameters that it does not name, and
    every rule keeps the momentum.

    Weight decay :math:`\lambda` moves by its kind. With decoupled decay the parameters are an
    average over the last :math:`1 / (\eta \lambda)` steps. As a part of the :math:`D / B` steps of
    the run, with batch size :math:`B` and :math:`D` examples, that is

    .. math:: \tau = \frac{B}{\eta \lambda D}, \qquad \text{kept by} \quad
        \lambda \to \lambda \, \frac{k}{r} \Big/ \frac{\eta_{new}}{\eta_{old}}.

    Independent decay is not multiplied by :math:`\eta`: its timescale :math:`B / (\lambda D)` is
    kept by :math:`\lambda \to \lambda k / r`. L2 decay and the decay of a step that is rescaled by
    norms are kept.

    No rule makes :math:`b_2` smaller than `b2_floor` or larger than `b2_ceiling`, nor `adam_sde`
    :math:`b_1` smaller than 0.6, which is about the smallest of published recipes. One that was
    beyond such a bound already is not moved to it. :math:`b_1` has no upper bound: with a much
    smaller batch it comes close to 1.

    Args:
        settings: the hyperparameters at `from_batch`.
        from_batch: the batch size of `settings`, 1 or more; in tokens, if you like.
        to_batch: the batch size that is wanted, 1 or more; smaller is allowed.
        rule: `"linear"` for SGD; `"sqrt"` for Adam, LAMB and LARS; `"adam_sde"` for Adam with its
            decay rates; `"token_half_life"` for the decay rate of the second moment alone;
            `"legew"` for LARS and LAMB with the warm-up; `"muon"` for Muon with Adam beside it;
            `"hyperball"` for MuonH and AdamH.
        run_length: the examples of the new run over those of the old one, positive.
        length_power: the power of `run_length` by which the rate is multiplied. None is that of the
            rule: -0.32 for `hyperball` (HyperP; Marin fits -0.395) and 0 for the others. For AdamW
            -0.32 was found, too (arXiv 2409.19913).
        decay_kind: `"decoupled"` for AdamW and Muon; `"independent"` for a decay that the step
            does not multiply by the peak of the rate, as in midGPT, big_vision and nanodo, where
            1e-4 stands for a decoupled 0.1 at a rate of 1e-3; `"l2"` for a decay that is added to
            the gradient; `"rescaled"` for LAMB, LARS and the hyperball. None is what the rule is
            most used with: L2 for `linear`, rescaled for `legew` and `hyperball`, and decoupled for
            the others. Say it if you scale LAMB or LARS by `sqrt`, or a decay that is independent.
        b2_floor: the smallest b2 that a rule makes, in [0, 1).
        b2_ceiling: the largest b2 that a rule makes, in [0, 1).
        noise_scale: the batch size up to which noise dominates the gradient, in the unit of
            `to_batch`: a number, or what `noise_scale` or `fit_critical_batch_size` returned. It
            changes no number; the account says whether the rule still holds, and if not, which
            learning rate (and decoupled weight decay) would be nearer.

    Returns:
        `settings` for the new batch size, and an `account` in words: print it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, a hyperparameter that the rule needs is None,
            or under `legew` the warm-up is longer than the run.

    Examples:
        >>> from optax_largebatch import Hyperparameters, scale_hyperparameters
        >>> adamw = Hyperparameters(
        ...     learning_rate=1e-3, weight_decay=0.1, b1=0.9, b2=0.999, eps=1e-8,
        ...     warmup_steps=800, total_steps=8000)
        >>> scaled = scale_hyperparameters(
        ...     adamw, from_batch=256, to_batch=1024, rule="adam_sde", noise_scale=8000)
        >>> print(scaled.settings.learning_rate, round(scaled.settings.b1, 3))
        0.002 0.6
        >>> print(scaled)
        adam_sde, batch size 256 to 1024 (k = 4):
          learning_rate  0.001 -> 0.002  times sqrt(k)
          weight_decay   0.1 -> 0.2      keeps B / (rate decay examples)
          b1             0.9 -> 0.6      (1 - b1) times k
          b2             0.999 -> 0.996  (1 - b2) times k
          eps            1e-08 -> 5e-09  divided by sqrt(k)
          warmup_steps   800 -> 200      the same part of the run
          total_steps    8000 -> 2000    times r / k
        Valid while the noise of the gradient outweighs the gradient, and no b is at a
        bound.
        Assumes decay_kind='decoupled'.
        Noise dominates: 1024 is within the noise scale of 8000.

    References:
        linear: Goyal et al., *Accurate, Large Minibatch SGD*, arXiv 1706.02677. sqrt: Krizhevsky,
        *One weird trick for parallelizing convolutional neural networks*, arXiv 1404.5997.
        adam_sde: Malladi et al., *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*,
        arXiv 2205.10287. token_half_life: Marek et al., *Small Batch Size Training for Language
        Models*, arXiv 2507.07101. legew: You et al., *Large-Batch Training for LSTM and Beyond*,
        arXiv 1901.08256. muon: rate and decay as in nanochat, `scripts/base_train.py`; b2 and
        epsilon as in Marin, `heuristic_muonh.py`. hyperball: Ren et al., *Rethinking Language Model
        Scaling under Transferable Hypersphere Optimization* (HyperP), arXiv 2603.28743; b2 and
        epsilon as in Marin. Weight decay: Wang and Aitchison, *How to set AdamW's weight decay as
        you scale model and dataset size*, arXiv 2405.13698; Bergsma et al., *Power Lines*, arXiv
        2505.13738. Independent decay: Wortsman et al., *Small-scale proxies for large-scale
        Transformer training instabilities*, arXiv 2309.14322. Noise scale: McCandlish et al., *An
        Empirical Model of Large-Batch Training*, arXiv 1812.06162.
    """
    if not isinstance(settings, Hyperparameters):
        raise TypeError(
            f"settings must be Hyperparameters(learning_rate=..., ...), got {settings!r} of type "
            f"{type(settings).__name__}."
        )
    arguments.check_integer("from_batch", from_batch, at_least=1)
    arguments.check_integer("to_batch", to_batch, at_least=1)
    from_batch, to_batch = int(from_batch), int(to_batch)
    arguments.check_choice("rule", rule, tuple(RULES))
    run_length = arguments.known_number("run_length", run_length, "(0, inf)")
    if length_power is not None:
        length_power = arguments.known_number("length_power", length_power, "(-inf, inf)")
    if decay_kind is not None:
        arguments.check_choice("decay_kind", decay_kind, tuple(scaling_rules.DECAYS))
    b2_floor = arguments.known_number("b2_floor", b2_floor, "[0, 1)")
    b2_ceiling = arguments.known_number("b2_ceiling", b2_ceiling, "[0, 1)")
    arguments.check_order(b2_floor=b2_floor, b2_ceiling=b2_ceiling)
    noise = None if noise_scale is None else _in_examples(noise_scale)

    law = RULES[rule]
    for name in law.needs:
        if getattr(settings, name) is None:
            raise ValueError(f"settings.{name} must be given for the rule {rule!r}, got None.")
    k = to_batch / from_batch
    rate, why = law.rate(k, run_length, length_power)
    kind = decay_kind or law.decay_kind
    laws = scaling_rules.LENGTHS | law.moves | {"weight_decay": scaling_rules.DECAYS[kind]}
    laws["learning_rate"] = Law(why, lambda old, change: old * change.rate)
    bounds = {"b1": (scaling_rules.B1_FLOOR, 1.0), "b2": (b2_floor, b2_ceiling)}
    old: dict[str, Any] = {
        name: int(value) if name.endswith("_steps") else float(value)
        for name, value in vars(settings).items()
        if value is not None
    }
    new, reasons = dict(old), {}
    for name, value in old.items():
        reasons[name], moved = laws.get(name, scaling_rules.NOT_MOVED)
        new[name] = moved(value, scaling_rules.Change(k, run_length, rate))
        floor, ceiling = bounds.get(name, (-math.inf, math.inf))
        # Bounds do not move what was outside before.
        bound = min(max(new[name], min(value, floor)), max(value, ceiling))
        if bound != new[name]:
            limit = f"floor {floor:g}" if bound > new[name] else f"ceiling {ceiling:g}"
            new[name], reasons[name] = bound, f"limited by the {limit}"
    if rule == "legew" and new["warmup_steps"] >= new["total_steps"]:
        raise ValueError(
            f"to_batch must leave more steps than settings.warmup_steps = {settings.warmup_steps} "
            f"under the rule 'legew', got {to_batch}: the warm-up keeps its steps, and the run has "
            f"{new['total_steps']} left. Take a smaller to_batch, or the rule 'sqrt'."
        )
    examples = "" if run_length == 1 else f", examples times r = {run_length:g}"
    lines = [
        _wrapped(f"{rule}, batch size {from_batch} to {to_batch} (k = {k:g}){examples}:"),
        *_table(old, new, reasons),
        _wrapped(law.valid),
    ]
    if decay_kind is None and "weight_decay" in old:
        lines.append(f"Assumes decay_kind={kind!r}.")
    if noise is not None:
        power = law.batch_power
        lines.append(_wrapped(_noise(from_batch, to_batch, noise, power, kind, new)))
    return ScaledHyperparameters(Hyperparameters(**new), "\n".join(lines))


def scale_batch_size(batch_size: int, *, run_length: float, power: float = 0.383) -> int:
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
    arguments.check_integer("batch_size", batch_size, at_least=1)
    run_length = arguments.known_number("run_length", run_length, "(0, inf)")
    power = arguments.known_number("power", power, "(-inf, inf)")
    return max(1, round(batch_size * run_length**power))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, break_on_hyphens=False, break_long_words=False)


def _table(old: dict[str, Any], new: dict[str, Any], reasons: dict[str, str]) -> list[str]:
    changes = {
        name: f"{_shown(value)} {'(kept)' if new[name] == value else f'-> {_shown(new[name])}'}"
        for name, value in old.items()
    }
    width = max(map(len, changes.values()))
    return [f"  {name:<13}  {text:<{width}}  {reasons[name]}" for name, text in changes.items()]


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _noise(
    old: int, new: int, scale: float, power: float, kind: DecayKind, scaled: dict[str, Any]
) -> str:
    """Whether noise dominates at both batch sizes; if not, a rate that levels off."""
    largest = max(old, new)
    if largest <= scale:
        return f"Noise dominates: {largest} is within the noise scale of {_rounded(scale)}."
    said = (
        f"Noise does not dominate: {largest} is {_rounded(largest / scale)} times the noise scale "
        f"of {_rounded(scale)}."
    )
    factor = ((old + scale) / (new + scale)) ** power
    if factor == 1:
        return said
    said += (
        f" A rate that levels off as (1 + {_rounded(scale)} / B)^-{power:g} would be "
        f"{scaled['learning_rate'] * factor:.3g}"
    )
    if kind == "decoupled" and scaled.get("weight_decay"):
        said += f"; with it, weight_decay {scaled['weight_decay'] / factor:.3g}"
    return f"{said}."


def _rounded(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _in_examples(noise_scale: Any) -> float:
    """The noise scale as a number; a critical batch size is one, too."""
    if isinstance(noise_scale, NoiseScale):
        noise_scale = noise_scale.noise_scale
    if isinstance(noise_scale, CriticalBatchSize):
        noise_scale = noise_scale.critical_batch_size
    if getattr(noise_scale, "shape", None) == ():
        noise_scale = noise_scale.item()
    arguments.check_number("noise_scale", noise_scale, "(0, inf]")
    return float(noise_scale)
