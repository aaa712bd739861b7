"""What stands beside every result."""

import platform

import jax
import optax

import optax_largebatch as lb


def machine() -> str:
    """Where and with what this ran."""
    here = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    return f"{here}, {versions()}"


def versions() -> str:
    """With what a program was made."""
    return f"jax {jax.__version__}, optax {optax.__version__}, optax_largebatch {lb.__version__}"
