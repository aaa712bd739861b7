"""Every optimizer takes the steps of the reference on every device, mesh and stack."""

import pytest

from optax_largebatch.testing import check
from tests.conftest import slow_but
from tests.helpers import drawn
from tests.optimizers.registry import OPTIMIZERS

# The micro-batches of `lbsgd` are around its transforms, which are tested by themselves.
NAMES = OPTIMIZERS.keys() - {"lbsgd"}
QUICK = ("lars", "muonh")
"""What the others do besides, `tests/test_same_everywhere.py` and the tests of their links see."""


@pytest.mark.parametrize("name", slow_but(QUICK, sorted(NAMES)))
def test_does_the_same_however_it_is_run(name):
    params = drawn({"bias": (6,), "kernel": (4, 6), "scale": (6,)})
    check(lambda stacked: OPTIMIZERS[name].make(stacked=stacked), params)
