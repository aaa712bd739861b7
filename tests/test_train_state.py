"""The `TrainState` of the guide hands every extra argument on, also under jit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_largebatch as lb

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "macro_batches_and_precision.md"
PARAMS = {"kernel": jnp.arange(1.0, 9.0).reshape(8, 1), "bias": jnp.ones(2)}


def train_state():
    """The class, as it stands in the guide."""
    (block,) = (x for x in GUIDE.read_text().split("```") if "class TrainState(" in x)
    names = {"optax": optax}
    exec(block.removeprefix("python\n").partition("\n\n\nrun =")[0], names)
    return names["TrainState"]


def created(optimizer, **fields):
    return train_state().create(apply_fn=None, params=PARAMS, tx=optimizer, **fields)


def test_hands_examples_and_flush_on():
    optimizer = lb.accumulate_gradients(lb.lamb(0.1), every=4)
    state = created(optimizer)
    apply = jax.jit(lambda state, **given: state.apply_gradients(grads=PARAMS, **given))
    state = apply(state, examples=3.0, flush=False)
    assert float(state.opt_state.examples) == 3
    state = apply(state, examples=1.0, flush=True)
    assert lb.has_updated(state.opt_state)
    assert int(state.step) == 2


def test_hands_the_loss_on_and_replaces_fields():
    state = created(lb.skip_bad_steps(lb.lars(0.1), deviations=6, window=2, of="loss"))
    for loss in (1.0, 1.1, 50.0):
        before, state = state, state.apply_gradients(grads=PARAMS, loss=loss, apply_fn=print)
    assert int(state.opt_state.skipped) == 1
    np.testing.assert_array_equal(state.params["kernel"], before.params["kernel"])
    assert state.apply_fn is print
