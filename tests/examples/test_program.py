"""The programs of the page "Your program", each run as a reader pastes it."""

import functools
import os
from pathlib import Path
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DEVICES = '("jax_num_cpu_devices", 8)'

PROGRAMS = ("nnx", "linen")
RUN = [
    pytest.param(
        "nnx",
        marks=pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="it needs jax.set_mesh"),
    ),
    "linen",
]

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
assert macro_step == STEPS

# What a step is given, it uses up.
given = jax.tree.leaves((params, state))
last_step()
assert all(leaf.is_deleted() for leaf in given)
"""


# AdamW at 512 becomes a ramp of MuonH to 16,384, in three statements.
PLANNED = """
run = lb.TunedRun(
    "adamw", batch_size=512, total=59_392, learning_rate=lb.PlannedRate(3e-4), weight_decay=0.1
)
plan = lb.batch_plan(
    "0:512 2048:4096 10240:16384", total=59_392, run=run.to("muonh"), micro_batch_size=512
)
optimizer = lb.planned_optimizer(
    plan,
    PARAMS,
    stacked={"layers/": 0},
    matrix_axes={"qkv/kernel": f"layers rows ({3 * HEADS} columns)"},
)
assert plan.calls == 116
print(run, plan, lb.explain(optimizer, PARAMS), sep="\\n")
"""
MACRO_STEP = {
    "nnx": """nnx.state(optimizer)["opt_state"]["macro_step"][...]""",
    "linen": """optax.tree.get(state, "macro_step")""",
}
OPTIMIZER = re.compile(
    r"^( *)rate = lb.warmup_decay.*every=MICRO_BATCHES\)\n", re.DOTALL | re.MULTILINE
)


def planned(name):
    """The program with the optimizer of a plan."""
    params = {"nnx": "nnx.state(model, nnx.Param)", "linen": "params"}[name]
    three = PLANNED.replace("PARAMS", params)

    def indented(found):
        lines = three + ("accumulated = optimizer\n" if name == "nnx" else "")
        return re.sub(r"^(?=.)", found[1], lines, flags=re.MULTILINE)

    program, number = OPTIMIZER.subn(indented, source(name))
    assert number == 1
    return program


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
    """What a program prints in a process of its own, in which a warning is an error."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("name", RUN)
def test_trains_on_eight_devices(name):
    losses = losses_of(name, 8)
    assert len(losses) == 30
    assert losses[-5:].mean() < 0.75 * losses[0], losses


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_has_the_losses_of_one_device(name):
    np.testing.assert_allclose(losses_of(name, 8), losses_of(name, 1), rtol=2e-3)


@pytest.mark.parametrize("name", RUN)
def test_takes_the_optimizer_of_a_plan(name):
    """The batch grows, and with it the momentum moves; one layer is one matrix."""
    printed = printed_by(planned(name) + f"\nprint('steps taken:', int({MACRO_STEP[name]}))\n")
    losses = losses_in(printed)
    assert losses[-5:].mean() < 0.9 * losses[0], losses
    assert re.search(r"layers/up/kernel +4x64x256 +4 of 64x256 +muon +sphere", printed)
    assert re.search(r"layers/qkv/kernel +4x64x192 +48 of 64x16 +muon +sphere", printed)
    assert "momentum       0.95 -> 0.7" in printed
    assert "steps taken: 9" in printed  # in 120 calls


@pytest.mark.parametrize("name", PROGRAMS)
def test_fits_the_page(name):
    lines = (ROOT / "examples" / f"program_{name}.py").read_text().splitlines()
    assert max(map(len, lines)) <= 84
