"""The facts about machine and versions beside every result."""

import os
import platform
import re

import jax
import optax

import optax_largebatch as lb


def machine() -> str:
    """The machine, the versions and the command of this run."""
    here = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    return f"{here}, {versions()}"


def folder() -> str:
    """The name of this machine's folder in `benchmarks/results`: that of its chip."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu-{os.cpu_count()}-cores"
    return re.sub("[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")


def versions() -> str:
    """The versions with which a program was made."""
    return f"jax {jax.__version__}, optax {optax.__version__}, optax_largebatch {lb.__version__}"
