"""The settings of one run, as plain fields."""

import dataclasses
from typing import Any, Literal

from optax_largebatch.arguments import Bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The settings of parameters that AdamW moves beside Muon or MuonH."""

    learning_rate: float | None = None
    """The peak of the schedule; None for that of the matrices."""
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run at one batch size.

    Settings that an algorithm does not have are None.
    """

    name: str
    """The model, the algorithm, and the source of the settings."""
    field: str
    """Language, speech, supervised or self-supervised vision."""
    task: str
    """The model and the goal of its training."""
    source: str
    """Where the settings were published."""
    note: str
    """Remarks, above all where sources contradict one another."""
    origin: str
    """The origin of the numbers: published as they are, extrapolated or replaced."""
    dialect: str | None
    """The row of the original on the page of dialects; None if it is not there."""
    result: str | None = None
    """The result of the published run; None where its source does not say."""

    algorithm: Literal["lamb", "lans", "lars", "larc", "sgd", "muon", "muonh", "scaled_adam"]
    not_decayed: tuple[str, ...]
    """The kinds of parameters without weight decay, see `matching_kinds`."""
    not_adapted: tuple[str, ...]
    """The kinds of parameters with a trust ratio of 1."""
    batch_size: int
    """Examples in a step; sequences, where `sequence_length` is given."""
    sequence_length: int | None = None
    """The tokens of a sequence, where the source counts the batch in tokens or sequences."""
    epochs: int | None = None
    """The epochs of the run; None where the source counts in steps."""
    learning_rate: float
    bias_learning_rate: float | None = None
    """The peak for the parameters that are not decayed; None where all have the same."""
    weight_decay: float | None = None
    total_steps: int
    warmup_steps: int
    warmup_begin_step: int = 0
    """The step at which the warm-up begins; below 0 where training begins in the middle of it."""
    warmup_begin_value: float = 0.0
    hold_steps: int | None = None
    """Steps at the peak after the warm-up."""
    others_hold_steps: int | None = None
    """The same for the parameters that Muon does not move; None where all have the same."""
    decay: Literal[
        "linear", "polynomial", "cosine", "constant", "drops", "exponential", "inverse_sqrt", "eden"
    ] = "linear"
    """The shape of the learning rate after the warm-up."""
    power: float | None = None
    """The power of the polynomial decay."""
    end_value: float = 0.0
    decay_from_start: bool = False
    """Whether the decay is counted from step 0 and not from the end of the warm-up."""
    drops: tuple[float, ...] | None = None
    """The parts of the run after which the rate falls to a tenth."""
    decay_rate: float | None = None
    """The factor of an exponential decay for each epoch."""
    steps_per_stair: int | None = None
    """The steps of an epoch, where the rate changes once in each."""
    lr_batches: float | None = None
    """The steps after which `eden` begins to fall."""
    lr_epochs: float | None = None
    """The epochs after which it does."""

    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    momentum: float | None = None
    momentum_begin_value: float | None = None
    """Muon's momentum at the first step; None if it is the same in the whole run."""
    momentum_warmup_steps: int = 0
    """The steps in which it grows to `momentum`. It falls while the rate falls."""
    momentum_end_value: float | None = None
    learning_rate_in_momentum: bool | None = None
    bias_correction: Literal["full", "none", "step_size"] | None = None
    max_grad_norm: float | None = None
    clipping_scale: float | None = None
    """The bound on the norm of the gradient, over the median of its recent norms."""
    param_norm_bounds: Bounds = None
    trust_ratio_bounds: Bounds = None
    trust_ratio_eps: float | None = None
    trust_coefficient: float | None = None
    denominator: Literal["paper", "update"] | None = None
    clip: bool | None = None
    """Whether the step of LARC is limited to that of SGD."""

    embeddings: Group | None = None
    """The embeddings beside Muon; None for the settings of `rest`."""
    head: Group | None = None
    """The last layer beside Muon; None for the settings of `rest`."""
    rest: Group | None = None
    """All other parameters beside Muon: vectors and scalars. None without Muon."""
    head_on_sphere: bool = False
    """Whether the last layer keeps its norm and takes Adam's direction (AdamH), at the rate of the
    matrices."""
    weight_decay_to_zero: bool = False
    """Whether the decay of the matrices falls to 0 along half a cosine."""
    nesterov: bool | None = None
    grad_averaging: bool | None = None
    """Whether Muon's momentum is a mean of gradients, and not a sum."""
    ns_coeffs: str | tuple[Any, ...] | None = None
    """The coefficients of Newton-Schulz, see `orthogonalize_momentum`."""
    ns_steps: int | None = None
    ns_dtype: str | None = None
    matrix_eps: float | None = None
    """Muon's epsilon, while `eps` is that of Adam."""
    eps_is_floor: bool | None = None
    consistent_rms: float | None = None
