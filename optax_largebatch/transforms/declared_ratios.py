"""How the transforms with a trust ratio declare their ratios."""

import dataclasses
from typing import Any

from optax_largebatch.arguments import Bounds
from optax_largebatch.engine.blocks import VectorOfBlocks
from optax_largebatch.params.masks import Mask, select_leaves
from optax_largebatch.params.stacked import check_stacked


@dataclasses.dataclass(frozen=True, eq=False)  # a mask may be a tree, which has no hash
class TrustRatios(VectorOfBlocks):
    """The trust ratios of the last step, one for each block, and what decides them.

    The state holds only numbers. The rest is here for the readers of a run.

    Args:
        stacked: the parameters that stack layers.
        initial: the value of all ratios before the first step.
        mask: the parameters that are adapted; the others have ratio 1.
        bounds: `(low, high)`, the bounds on a ratio.
    """

    initial: float = 1.0
    mask: Mask = None
    bounds: Bounds = None

    def adapted(self, params: Any) -> list[bool]:
        """Whether each parameter is adapted."""
        return select_leaves(
            "trust_ratio_mask", self.mask, check_stacked(self.stacked).blocks(params)
        )
