"""The engine for transformations written leaf by leaf, also for your own. Experimental.

A leaf program says what happens to one leaf (one array of the parameters), `transformation` makes
an optax transformation of it, and `optax_largebatch.testing.check` tests it. The guide "Your own
optimizer" shows how; README.md beside this file explains what happens inside. Names and arguments
here may change with every minor version.
"""

from optax_largebatch.engine.blocks import NumberPerBlock, VectorOfBlocks
from optax_largebatch.engine.requests import (
    Leaf,
    LeafProgram,
    block_means,
    block_norms,
    block_rms,
    block_sums,
    each_matrix,
    global_norm,
    hoist,
    in_parallel,
    materialize,
    sums_over_devices,
)
from optax_largebatch.engine.state import Counter, PerAxis, PerParameter, Shared, StateOf, declare
from optax_largebatch.engine.to_optax import leaf_transform_of, transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.blocks import Layers
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.matrices import Matrices
from optax_largebatch.params.matrix_axes import matrices_of

__all__ = [
    "Counter", "Layers", "Leaf", "LeafProgram", "LeafTransform", "Leaves", "Matrices",
    "NumberPerBlock", "PerAxis", "PerParameter", "Shared", "StateOf", "VectorOfBlocks",
    "block_means", "block_norms", "block_rms", "block_sums", "declare", "each_matrix",
    "global_norm", "hoist", "in_parallel", "leaf_transform_of", "materialize", "matrices_of",
    "sums_over_devices", "transformation",
]  # fmt: skip
