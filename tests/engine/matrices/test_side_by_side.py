"""On a GPU the matrices of several parameters are multiplied as one batch."""

import functools

import chex
import jax
import numpy as np
import pytest

import optax_largebatch as lb
from optax_largebatch.engine.execution_plans import ONE_GPU, SHARDS_ON_GPUS
from optax_largebatch.engine.matrices import side_by_side
from tests import helpers
from tests.engine.steps import lowered, use_plan

SHAPES = {
    **{f"attention_{k}": (8, 8) for k in range(7)},
    **{f"up_{k}": (8, 12) for k in range(4)},
    **{f"down_{k}": (12, 8) for k in range(4)},
    "stack": (3, 8, 12),
    "heads": (8, 3 * 8),
    "bias": (8,),
}
STACKED = {"stacked": {"stack": 0}, "ns_steps": 2}
SETTINGS = STACKED | {"matrix_axes": {"heads": "rows (3 columns)"}}
OPTIMIZERS = {
    "muonh": lambda: lb.muonh(0.1, **SETTINGS),
    "muon, clipped": lambda: lb.chain(
        lb.clip_by_global_norm(1.0), lb.muon(0.1, consistent_rms=0.2, **STACKED)
    ),
}


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch):
    """Five matrices of 8 x 8 fill the device."""
    monkeypatch.setattr(side_by_side, "ELEMENTS_AT_A_TIME", 5 * 8 * 8)


@pytest.fixture
def params():
    return helpers.drawn(SHAPES)


def two_steps(name):
    """The updates and the state after each of two steps."""
    params, optimizer = helpers.drawn(SHAPES), OPTIMIZERS[name]()
    step, state = jax.jit(lambda *args: optimizer.update(*args)), optimizer.init(params)
    for seed in (1, 2):
        updates, state = step(helpers.drawn(SHAPES, seed=seed), state, params)
        yield updates, state


@functools.cache
def alone(name):
    """The steps on a CPU, which multiplies matrices one after the other."""
    return [*two_steps(name)]


@pytest.mark.parametrize("plan", [ONE_GPU, SHARDS_ON_GPUS], ids=["one GPU", "shards on GPUs"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_those_of_each_parameter_alone(name, plan, monkeypatch):
    expected = alone(name)
    use_plan(monkeypatch, plan)
    jax.clear_caches()  # the programs of the other plan
    chex.assert_trees_all_close([*two_steps(name)], expected, rtol=1e-4, atol=1e-5)


def test_a_gpu_multiplies_in_batches(params):
    """Of seven matrices five and two; of four one batch, of either shape, as the stack takes."""
    shapes = {name: x for name, x in params.items() if name not in ("heads", "stack")}
    on_cpu, on_gpu = lowered(lb.muon(0.1), shapes, "cpu", "cuda")
    assert on_cpu.count("dot_general") == 15 * 15
    assert on_gpu.count("dot_general") == 15 * 4
    assert np.all([f"tensor<{shape}xf32>" in on_gpu for shape in ("5x8x8", "2x8x8", "4x8x12")])
