"""Published settings with their sources, and rules that scale them to another batch size."""

from optax_largebatch.recipes.lookup import get
from optax_largebatch.recipes.published import batch_sizes, examples_to_target, names
from optax_largebatch.recipes.ramp_plans import ramp
from optax_largebatch.recipes.ramp_table import Ramps, ramps
from optax_largebatch.recipes.recipe import Recipe
from optax_largebatch.recipes.table import Catalogue, table

__all__ = [
    "Catalogue",
    "Ramps",
    "Recipe",
    "batch_sizes",
    "examples_to_target",
    "get",
    "names",
    "ramp",
    "ramps",
    "table",
]
