"""The warm-up of LBSGD goes by micro-batches, however many make a macro-batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

SCALE, WARMUP = 4, 12


@pytest.mark.parametrize("counted", [0, 6], ids="goes on after {}".format)
def test_the_warm_up_counts_micro_batches_under_flush(counted):
    """Macro-batches of 4, 2, 4, 1 and 4 micro-batches end after 4, 6, 10, 11 and 15 of them."""
    optimizer = lb.lbsgd(1.0, batch_scale=SCALE, warmup_epochs=4, updates_per_epoch=WARMUP // 4)
    step = jax.jit(optimizer.update)
    params = jnp.zeros(1)
    state = optax.tree.set(optimizer.init(params), micro_batches=jnp.int32(counted))
    steps = {}
    for c in range(1, 16):
        updates, state = step(jnp.ones(1), state, params, flush=c in (6, 11))
        if updates[0]:
            steps[c] = -float(updates[0])
    assert list(steps) == [4, 6, 10, 11, 15]
    counts = counted + np.array(list(steps))
    expected = 1 + (SCALE - 1) * np.minimum(counts / WARMUP, 1)
    np.testing.assert_allclose(list(steps.values()), expected, rtol=1e-6)
    assert int(state.inner_state[1].micro_batches) == counted + 15
