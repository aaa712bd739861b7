"""A recipe: the numbers of one run, and the optimizer and the schedule made of them."""

import dataclasses
from typing import Literal

import optax

from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import lars
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.rules import excluding
from optax_largebatch.recipes.sgd import sgd, warmup_and_drops
from optax_largebatch.schedules.warmup import warmup_hold_decay, warmup_polynomial

KERNELS = excluding("bias", "scale")
"""What every recipe decays and adapts: all but biases and normalisation scales."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of one run at one batch size. `get` finds it.

    What an algorithm does not have is None.
    """

    name: str
    """The task, the algorithm, and whose settings they are."""
    task: str
    """What is trained, and to what."""
    source: str
    """Where the settings were published."""
    note: str
    """What else there is to know."""
    origin: str
    """Whether exactly these numbers were published, and if not, how they were made."""

    algorithm: Literal["lamb", "lans", "lars", "sgd"]
    batch_size: int
    learning_rate: float
    weight_decay: float
    total_steps: int
    warmup_steps: int
    warmup_begin_step: int = 0
    """0, or less where training begins in the middle of the warm-up."""
    warmup_begin_value: float = 0.0
    hold_steps: int | None = None
    """Steps at the peak after the warm-up."""
    power: float | None = None
    """The power of the polynomial decay."""
    end_value: float = 0.0
    decay_from_start: bool = False
    """Whether the decay is counted from step 0 and not from the end of the warm-up."""
    drops: tuple[float, ...] | None = None
    """The parts of the run after which the rate falls to a tenth."""

    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    momentum: float | None = None
    momentum_of: Literal["steps", "directions"] = "steps"
    bias_correction: Literal["full", "none"] = "full"
    max_grad_norm: float | None = None

    def schedule(self) -> optax.Schedule:
        """The learning rate: step (0 first) to value."""
        if self.drops is not None:
            return warmup_and_drops(
                self.learning_rate,
                self.warmup_begin_value,
                self.warmup_steps,
                [round(part * self.total_steps) for part in self.drops],
            )
        if self.hold_steps is not None:
            return warmup_hold_decay(
                self.learning_rate, self.warmup_steps, self.hold_steps, self.total_steps
            )
        return warmup_polynomial(
            self.learning_rate,
            self.total_steps,
            power=1.0 if self.power is None else self.power,
            end_value=self.end_value,
            warmup_steps=self.warmup_steps,
            warmup_begin_value=self.warmup_begin_value,
            warmup_begin_step=self.warmup_begin_step,
            decay_begin_step=0 if self.decay_from_start else None,
        )

    def optimizer(self, mask: Mask = KERNELS) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with its schedule.

        Args:
            mask: the parameters that are decayed and adapted; the published runs leave out biases
                and normalisation scales. A network where one of the names `bias` and `scale` does
                not occur needs a mask of its own, such as `at_least_ndim(2)`.

        Returns:
            The optimizer. Its `update` needs the parameters.

        Raises:
            TypeError: `mask` is no mask.
            ValueError: a pattern of the mask matches no parameter, when the optimizer meets them.

        Examples:
            >>> import jax.numpy as jnp
            >>> from optax_largebatch import recipes
            >>> optimizer = recipes.get("bert-large/lamb/mlperf", batch_size=256).optimizer()
            >>> kernel = jnp.array([3.0, -4.0])
            >>> params = {"kernel": kernel, "bias": jnp.zeros(2), "scale": jnp.ones(2)}
            >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
            >>> length = jnp.linalg.norm(updates["kernel"]) / jnp.linalg.norm(kernel)
            >>> print(f"{length:.6f}")
            0.000350
        """
        rate = self.schedule()
        given = {name: getattr(self, name) for name in _ARGUMENTS[self.algorithm]}
        if self.algorithm == "sgd":
            return sgd(rate, weight_decay_mask=mask, **given)
        family = {"lamb": lamb, "lans": lans, "lars": lars}[self.algorithm]
        return family(rate, weight_decay_mask=mask, trust_ratio_mask=mask, **given)

    def summary(self) -> str:
        """The recipe in a few lines, for people."""
        values = {name: getattr(self, name) for name in _ARGUMENTS[self.algorithm]}
        numbers = {"learning_rate": self.learning_rate} | {
            name: value for name, value in values.items() if isinstance(value, float)
        }
        listed = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        return "\n".join(
            [
                f"{self.name} at batch size {self.batch_size}: {self.task}.",
                f"  Numbers:  {self.origin}.",
                f"  {self.algorithm.upper()}:  {listed}.",
                f"  Schedule:  {self._schedule_in_words()}.",
                f"  Note:  {self.note}",
                f"  Source:  {self.source}.",
            ]
        )

    def _schedule_in_words(self) -> str:
        warmup = f"{self.warmup_steps} steps of warm-up" if self.warmup_steps else "no warm-up"
        if self.warmup_begin_step:
            warmup += f", {-self.warmup_begin_step} of them before training begins"
        if self.drops is not None:
            steps = ", ".join(str(round(part * self.total_steps)) for part in self.drops)
            decay = f"a tenth of the rate after steps {steps}"
        elif self.hold_steps is not None:
            decay = f"{self.hold_steps} steps of hold, then a linear decay"
        else:
            decay = f"decay with power {self.power:g}"
            if self.decay_from_start:
                decay += " counted from step 0"
            if self.end_value:
                decay += f" to {self.end_value:g}"
        return f"{warmup}, {decay}, {self.total_steps} steps in all"


_ARGUMENTS = {
    "lamb": ("b1", "b2", "eps", "weight_decay", "max_grad_norm", "bias_correction"),
    "lans": ("b1", "b2", "eps", "weight_decay"),
    "lars": ("momentum", "eps", "weight_decay", "momentum_of"),
    "sgd": ("momentum", "weight_decay"),
}
"""What an algorithm takes from its recipe, besides the learning rate."""
