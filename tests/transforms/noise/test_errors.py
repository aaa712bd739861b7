"""Mistakes are errors that say what to do."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step, mesh_of
from tests.transforms.noise.quadratic import needs_shard_map


def test_says_the_three_ways_where_there_are_no_small_batches():
    optimizer, params = lb.chain(lb.measure_noise_scale(), lb.lamb(0.1)), jnp.ones(3)
    with pytest.raises(ValueError, match="small_batches must be given") as caught:
        first_step(optimizer, params, params)
    for way in ("accumulate_gradients(", "small_batches_of_devices(", "small_batches_of_examples("):
        assert way in str(caught.value)


ONE = jnp.ones((1, 3))
TWO = jnp.ones((2, 3))
MISTAKES = {
    "one micro-batch": (
        lambda: lb.accumulate_gradients(lb.measure_noise_scale(), every=1, small_batches=True),
        "every must be 2 or more with small_batches=True, got 1",
    ),
    "one example": (
        lambda: lb.small_batches_of_examples(ONE, ONE[0], mean=ONE[0]),
        r"first axis of two examples or more.*got \[\(1,\)\]",
    ),
    "no examples": (
        lambda: lb.small_batches_of_examples(jnp.ones(()), jnp.ones(()), mean=jnp.ones(())),
        r"first axis of two examples or more",
    ),
    "another shape": (
        lambda: lb.small_batches_of_examples(TWO, jnp.ones(2), mean=jnp.ones(2)),
        r"must have the shape \(2, 2\), got \(2, 3\)",
    ),
    "one device": (
        lambda: jax.vmap(
            lambda x: lb.small_batches_of_devices(x, x, axis_name="data", mean=x), axis_name="data"
        )(ONE),
        "two devices or more, got 'data' with one",
    ),
    "handed to accumulate_gradients": (
        lambda: lb.accumulate_gradients(lb.measure_noise_scale(), every=2).update(
            ONE[0],
            lb.accumulate_gradients(lb.measure_noise_scale(), every=2).init(ONE[0]),
            small_batches=lb.small_batches_of_examples(TWO, TWO[0], mean=TWO[0]),
        ),
        "must not be given .* small_batches=True",
    ),
    "another number of blocks": (
        lambda: lb.measure_noise_scale().update(
            ONE[0], lb.measure_noise_scale().init(ONE[0]), small_batches=lb.SmallBatches.none(2)
        ),
        "has 2 blocks and measure_noise_scale has 1",
    ),
    "a stack of another length": (
        lambda: lb.accumulate_gradients(optax.sgd(0.1), every=2, small_batches=True).update(
            [ONE[0], ONE[0]],
            lb.accumulate_gradients(optax.sgd(0.1), every=2)
            .init([ONE[0], ONE[0]])
            ._replace(small_batches=lb.SmallBatches.none(3)),
        ),
        "small_batches has 3 entries and the parameters have 2 blocks",
    ),
    "a state without one": (lambda: lb.noise_scale(optax.EmptyState()), "must hold one noise"),
    "other parameters": (
        lambda: lb.layer_noise_scales(lb.measure_noise_scale().init(ONE), [ONE, ONE]),
        "noise of 1 blocks, and params have 2",
    ),
    "a mean of another shape": (
        lambda: lb.small_batches_of_examples(TWO, TWO[0], mean=TWO),
        "mean must have the shapes of the parameters",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        make()


@needs_shard_map
@pytest.mark.parametrize("mistake", ["mean", "when"])
def test_what_must_be_the_same_on_all_devices(mistake):
    message = {
        "mean": r"mean must be reduced over the mesh axis 'data'.*jax.lax.pmean\(grads, 'data'\)",
        "when": "when must be the same on all devices; it differs along the mesh axes 'data'",
    }[mistake]

    def parts(own):
        mean = own if mistake == "mean" else jax.lax.pmean(own, "data")
        when = jnp.all(own > 0) if mistake == "when" else True
        return lb.small_batches_of_devices(own, jnp.ones(1), axis_name="data", mean=mean, when=when)

    run = jax.shard_map(parts, mesh=mesh_of(data=8), in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match=message):
        run(jnp.ones(8))


@needs_shard_map
@pytest.mark.parametrize("mistake", ["summed", "split over the same axis"])
def test_gradients_that_are_summed_over_the_devices_already(mistake):
    split = P("data") if mistake != "summed" else P()
    message = {
        "summed": r"'w' is the same .* jax.lax.pcast\(params, 'data', to='varying'\)",
        "split over the same axis": "'w' is split along axis_name, 'data'",
    }[mistake]

    def parts(params, batch):
        def loss(params):
            return jnp.sum(params["w"]) * jnp.sum(batch)

        return lb.small_batches_of_devices(
            jax.grad(loss)(params), params, axis_name="data", mean=params
        )

    in_specs = {"w": split}, P("data")
    run = jax.shard_map(parts, mesh=mesh_of(data=8), in_specs=in_specs, out_specs=P())
    with pytest.raises(ValueError, match=message):
        run({"w": jnp.ones(8)}, jnp.ones(8))
