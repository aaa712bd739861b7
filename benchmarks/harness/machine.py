"""The facts about machine and versions beside every result."""

import os
from pathlib import Path
import platform
import re

import jax
import optax

import optax_largebatch as lb


def machine() -> str:
    """The machine and the versions of this run."""
    here = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    return f"{here}, {versions()}"


def processor() -> str:
    """The processor, which decides how sums are rounded."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    known = [facts[key] for key in ("model name", "cpu family", "model") if key in facts]
    return ", ".join(known) or platform.processor()


def folder() -> str:
    """The name of this machine's folder in `benchmarks/results`: that of its chip."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu-{os.cpu_count()}-cores"
    return re.sub("[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")


def versions() -> str:
    """The versions with which a program was made."""
    return f"jax {jax.__version__}, optax {optax.__version__}, optax_largebatch {lb.__version__}"
