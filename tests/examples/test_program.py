"""The programs of the page "Your program", each run as a reader pastes it."""

import functools
import os
from pathlib import Path
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DEVICES = '("jax_num_cpu_devices", 8)'

PROGRAMS = ("nnx", "linen")

# What is looked at after the last step; it has the names of the program.
BEFORE = {
    "nnx": """
first = nnx.state(make()[0], nnx.Param)
params, state = nnx.state(model, nnx.Param), nnx.state(optimizer)["opt_state"]
last_step = lambda: step(model, optimizer, tokens)
macro_step = state["macro_step"].get_value()
""",
    "linen": """
first = make()
last_step = lambda: step(params, state, tokens)
macro_step = optax.tree.get(state, "macro_step")
""",
}
AFTERWARDS = """
def norms(params):
    stacks = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 3]
    return jnp.array([jnp.linalg.norm(leaf, axis=(1, 2)) for leaf in stacks])

# Each layer of a stack keeps a norm of its own.
before, after = norms(first), norms(params)
assert before.shape == (4, LAYERS), before.shape
assert jnp.all(jnp.ptp(before, axis=1) > 0.01), before
assert jnp.allclose(before, after, rtol=1e-4), (before, after)

# All matrices lie in eight parts: parameters, moments and the sum of the gradients.
arrays = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size > 4 * 256]
assert len(arrays) == 4 * 6 - 4, len(arrays)  # Muon has one moment of each stack
for leaf in arrays:
    assert 8 * leaf.addressable_shards[0].data.size == leaf.size, leaf.sharding
assert macro_step == STEPS

# What a step is given, it uses up.
given = jax.tree.leaves((params, state))
last_step()
assert all(leaf.is_deleted() for leaf in given)
"""


@functools.cache
def losses_of(name, devices):
    """The losses that it prints, in a process of its own, in which a warning is an error."""
    program = (ROOT / "examples" / f"program_{name}.py").read_text()
    assert program.count(DEVICES) == 1
    program = program.replace(DEVICES, f'("jax_num_cpu_devices", {devices})')
    if devices > 1:
        program += BEFORE[name] + AFTERWARDS
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert finished.returncode == 0, finished.stderr
    return np.array(re.findall(r"^step +\d+  loss ([\d.]+)$", finished.stdout, re.M), float)


@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_on_eight_devices(name):
    losses = losses_of(name, 8)
    assert len(losses) == 30
    assert losses[-5:].mean() < 0.75 * losses[0], losses


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_has_the_losses_of_one_device(name):
    np.testing.assert_allclose(losses_of(name, 8), losses_of(name, 1), rtol=2e-3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_fits_the_page(name):
    lines = (ROOT / "examples" / f"program_{name}.py").read_text().splitlines()
    assert max(map(len, lines)) <= 84
