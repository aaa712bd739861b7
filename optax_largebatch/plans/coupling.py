"""How the learning rate and the weight decay follow the batch size."""

from typing import Literal

Coupling = Literal["sqrt", "linear", "none"]

POWERS: dict[Coupling, float] = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}
"""The powers of the batch size that the learning rate follows."""

DecayKind = Literal["decoupled", "independent", "l2", "rescaled"]
"""Weight decay that is multiplied by the learning rate, as in AdamW and Muon; that is multiplied by
the shape of its schedule alone, as in midGPT; that is a part of the loss; or of a step that norms
rescale, as in LAMB and LARS."""

DECAY_KINDS: tuple[DecayKind, ...] = ("decoupled", "independent", "l2", "rescaled")
