"""The programs of the page "Your program", each run as a reader pastes it."""

import functools
import os
import re

import jax
import numpy as np
import pytest

from tests import processes
from tests.size import ROOT

DEVICES = '("jax_num_cpu_devices", 8)'

NEEDS_SET_MESH = pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="it needs jax.set_mesh")
NNX = pytest.param("nnx", marks=NEEDS_SET_MESH)

# What is looked at after the last step; it has the names of the program.
BEFORE = {
    "nnx": """
first = nnx.state(make()[0], nnx.Param)
params, state = nnx.state(model, nnx.Param), nnx.state(optimizer)["opt_state"]
last_step = lambda: step(model, optimizer, tokens)
macro_step = state["macro_step"][...]
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
assert macro_step == 42

# What a step is given, it uses up.
given = jax.tree.leaves((params, state))
last_step()
assert all(leaf.is_deleted() for leaf in given)
"""


# The run of the program with these numbers: AdamW at 512 becomes a ramp of MuonH to 16,384.
TO_16K = {
    "batch_size=16": "batch_size=512",
    "0:16 256:64": "0:512 2048:4096 10240:16384",
    "total=1280": "total=59_392",
    "total=1920": "total=59_392",
}


def source(name):
    return (ROOT / "examples" / f"program_{name}.py").read_text()


@functools.cache
def losses_of(name, devices):
    """The losses that a program prints."""
    program = source(name)
    assert program.count(DEVICES) == 1
    program = program.replace(DEVICES, f'("jax_num_cpu_devices", {devices})')
    if devices > 1:
        program += BEFORE[name] + AFTERWARDS
    return losses_in(printed_by(program))


def losses_in(text):
    return np.array(re.findall(r"^step +\d+  loss ([\d.]+)$", text, re.M), float)


def printed_by(program):
    """What a program prints that says itself how many devices it has."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    return processes.printed_by(program, flags, seconds=1500)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NNX, "linen"])
def test_trains_on_eight_devices(name):
    losses = losses_of(name, 8)
    assert len(losses) == 42
    assert losses[-5:].mean() < 0.5 * losses[0], losses


@pytest.mark.slow
@pytest.mark.parametrize("name", [NNX, "linen"])
def test_has_the_losses_of_one_device(name):
    np.testing.assert_allclose(losses_of(name, 8), losses_of(name, 1), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NNX, "linen"])
def test_goes_from_512_to_16k(name):
    """The batch grows, and with it the momentum moves; one head is one matrix."""
    program = source(name)
    for old, new in TO_16K.items():
        program = program.replace(old, new)
    printed = printed_by(program)
    losses = losses_in(printed)
    assert len(losses) == 9
    assert losses[-3:].mean() < 0.9 * losses[0], losses
    assert re.search(r"layers/up/kernel +4x64x256 +4 of 64x256 +muon +sphere", printed)
    assert re.search(r"layers/qkv/kernel +4x64x192 +48 of 64x16 +muon +sphere", printed)
    assert "momentum       0.95 -> 0.7" in printed


@pytest.mark.slow
def test_keras_trains():
    """Each head is a matrix, and the model has what was trained in the end."""
    afterwards = "assert not any(v.value.is_deleted() for v in model.variables)"
    printed = printed_by(f"{source('keras')}\n{afterwards}")
    losses = losses_in(printed)
    assert len(losses) == 42
    assert losses[-5:].mean() < 0.5 * losses[0], losses
    assert re.search(r"attention_1/query/kernel +64x4x16 +4 of 64x16 +muon +sphere", printed)
    assert re.search(r"attention_1/attention_output/kernel +4x16x64 +4 of 16x64 +muon", printed)
    assert re.search(r"up_0/kernel +64x256 +1 of 64x256 +muon +sphere", printed)


@pytest.mark.parametrize("name", ["nnx", "linen", "keras"])
def test_fits_the_page(name):
    assert max(map(len, source(name).splitlines())) <= 84
