"""Every recorded run of a peer, reproduced over all its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import golden

PEERS = (
    "mxnet_2_0_0b1",
    "mxnet_1_9_1",
    "torch_peers",
    "tensorflow_peers",
    "keras",
    "icefall",
    "vision_peers",
)
CASES = [case for peer in PEERS for case in golden.load(peer)]


def largest_difference(case: golden.Case, dtype: str) -> float:
    """The largest error of a parameter at any step, over the largest value of its leaf."""
    optimizer = case.optimizer

    def step(carry, grads):
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    params, grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), (case.params, case.grads))
    _, trajectory = jax.jit(lambda p, g: jax.lax.scan(step, (p, optimizer.init(p)), g))(
        params, grads
    )

    def error(ours, theirs):
        largest = np.abs(theirs).max() or 1.0  # a leaf may stay at zero
        return float(np.abs(np.asarray(ours) - theirs).max() / largest)

    return max(jax.tree.leaves(jax.tree.map(error, trajectory, case.trajectory)))


def test_all_cases_are_here():
    counts = {peer: sum(case.peer == peer for case in CASES) for peer in PEERS}
    assert counts == {
        "mxnet_2_0_0b1": 32,
        "mxnet_1_9_1": 10,
        "torch_peers": 12,
        "tensorflow_peers": 8,
        "keras": 4,
        "icefall": 12,
        "vision_peers": 50,
    }


def is_long(case: golden.Case) -> bool:
    """Whether a run is left to the slow tests: of each training repository one is not."""
    if case.peer != "vision_peers":
        return "learned_gradient_" in case.name
    repository = case.name.split("_")[0]
    return case.name != next(c.name for c in CASES if c.name.split("_")[0] == repository)


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "float32"], ids=repr)
def test_float32_peers_in_float32(case):
    assert largest_difference(case, "float32") < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "float32"], ids=repr)
def test_float32_peers_in_float64(case, x64):
    # NVIDIA's TensorFlow code rounds 1 - b^t itself, which is 1e-5 of it.
    limit = 2e-5 if case.name.startswith("nvidia_bert_tf") else 1e-5
    assert largest_difference(case, "float64") < limit


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * is_long(c)) for c in CASES if c.dtype == "float64"],
    ids=repr,
)
def test_float64_peers(case, x64):
    assert largest_difference(case, "float64") < 1e-11
