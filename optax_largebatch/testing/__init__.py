"""Tools for tests of your own transformations."""

from optax_largebatch.testing.check import check
from optax_largebatch.testing.reference import reference

__all__ = ["check", "reference"]
