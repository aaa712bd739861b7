"""Plain JAX: parameters in tuples, a donated step on a mesh, and ZeRO stage 1 for the moments."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    MICRO_BATCHES,
    NAMES,
    NEEDS_JAX_0_8,
    OPTIMIZERS,
    accumulated,
    assert_log,
    through_a_checkpoint,
)

WIDTHS = (4, 8, 8, 1)


def first_params():
    keys = jax.random.split(jax.random.key(0), len(WIDTHS))
    columns = zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    return tuple((jax.random.normal(key, (i, o)) / i**0.5, jnp.zeros(o)) for key, i, o in columns)


def net(params, x):
    *hidden, (kernel, bias) = params
    for own_kernel, own_bias in hidden:
        x = jnp.tanh(x @ own_kernel + own_bias[None])
    return x @ kernel + bias[None]


def batch(number):
    x = jax.random.normal(jax.random.key(number), (16, 4))
    return x, jnp.sum(x, axis=1, keepdims=True)


@NEEDS_JAX_0_8
@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    optimizer = accumulated(OPTIMIZERS[name]())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())

    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((net(p, x) - y) ** 2))(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        metrics = lb.step_metrics(state, params, gradients=gradients, updates=updates)
        return params, state, (loss, metrics)

    params = jax.device_put(first_params(), whole)
    places = lb.optimizer_state_shardings(optimizer, params, mesh, axis="data")
    split = [place.spec for place in jax.tree.leaves(places) if any(place.spec)]
    assert len(split) == (10 if name == "lars" else 15)  # of 8 elements or more, in each copy
    state = jax.jit(optimizer.init, out_shardings=places)(params)
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=(whole, places, None))

    def run(params, state, numbers):
        results = []
        for number in numbers:
            x, y = jax.device_put(batch(number), NamedSharding(mesh, P("data")))
            params, state, result = compiled(params, state, x, y)
            results.append(result)
        return params, state, results

    *halfway, first = run(params, state, range(MICRO_BATCHES // 2))
    saved = through_a_checkpoint(tmp_path / "run", tuple(halfway))
    params, state, rest = run(*halfway, range(MICRO_BATCHES // 2, MICRO_BATCHES))
    losses, log = zip(*first, *rest, strict=True)
    assert_log(log, losses)
    *_, again = run(*saved, range(MICRO_BATCHES // 2, MICRO_BATCHES))
    jax.tree.map(np.testing.assert_array_equal, again, rest)
    ratios = lb.trust_ratios(optimizer, state, params)
    names = {ratio.removeprefix("momentum_branch/") for ratio in ratios}
    assert names >= {"0/0", "0/1", "1/0", "1/1", "2/0", "2/1"}
