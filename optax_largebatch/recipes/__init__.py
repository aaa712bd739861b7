"""Published settings with their sources, and rules that scale them to another batch size."""

from optax_largebatch.recipes.batch_ramps import ramp
from optax_largebatch.recipes.catalogue import batch_sizes, examples_to_target, names, table
from optax_largebatch.recipes.lookup import get
from optax_largebatch.recipes.recipe import Recipe

__all__ = ["Recipe", "batch_sizes", "examples_to_target", "get", "names", "ramp", "table"]
