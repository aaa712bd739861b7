"""What optax needs."""

import pytest


@pytest.fixture(autouse=True)
def of_users(standard_promotion):
    """Every test runs as users run it."""
