"""What becomes of each field of each state, and of what few optimizers keep."""

import contextlib
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.owners import nodes_of
from tests import helpers
from tests.migration.switches import (
    LAMB,
    PARAMS,
    SCHEDULE,
    as_orbax,
    gradients,
    masked,
    same_places,
    sums_gradients,
    without_bias,
)
from tests.optimizers.registry import OPTIMIZERS

STEPS = 3
RATE = lb.scale_by_learning_rate(SCHEDULE)


def norm_muon(**settings):
    return lb.chain(lb.orthogonalize_momentum(), lb.normalize_neurons(**settings), RATE)


def beside_lamb(inner):
    """The optimizer for matrices, and LAMB for vectors."""
    labels = {"kernel": "matrix", "bias": "vector"}
    return optax.partition({"matrix": inner, "vector": LAMB}, labels)


def averaging(inner):
    return lb.average_weights(inner, half_life=2)


def chained(*links):
    return lb.chain(lb.scale_by_adam(), *links, RATE)


NOISE = lb.chain(lb.measure_noise_scale(), LAMB)
KEEPING = {
    "lars": lb.lars(SCHEDULE),
    "clipping": chained(lb.clip_by_median_norm(2.0, window=3), lb.scale_by_parameter_rms()),
    "cain": OPTIMIZERS["cain"].make(),
    "learned_gradient": OPTIMIZERS["learned_gradient"].make(),
    "muonh": lb.muonh(SCHEDULE, radius="start"),
    "lans": lb.lans(SCHEDULE),
    "lbsgd": lb.lbsgd(0.1, momentum=0.9, batch_scale=2, warmup_strategy="lars"),
    "NorMuon": beside_lamb(norm_muon()),
    "second moment": lb.chain(lb.accumulate_momentum(0.9), lb.scale_by_second_moment(0.9), RATE),
    "decay": chained(lb.add_decayed_weights(0.1), lb.decay_to_target_rms(0.1)),
    "clamping": chained(lb.clamp_parameters(5.0)),
    "noise scale": lb.accumulate_gradients(NOISE, every=2, small_batches=True),
    "skipping": lb.skip_bad_steps(LAMB, deviations=6, window=2),
    "loss scale": lb.dynamic_loss_scale(LAMB, initial_scale=8.0, growth_interval=9),
    "masters": lb.master_weights(LAMB),
    "average": averaging(LAMB),
    "rounding": lb.stochastic_rounding(LAMB),
}
FIELDS = json.loads(pathlib.Path(__file__).with_name("fields.json").read_text())
"""What becomes of each field of each state of this library."""


def state_after(optimizer, params=PARAMS, count=STEPS, bad=False):
    """The state after some steps with gradients of their own, and one that is left out."""

    def gradient(params, index):
        value = jnp.where(index == count, jnp.nan, 1.0)
        return jax.tree.map(lambda x: (value * jnp.cos(3 * x + index)).astype(x.dtype), params)

    return helpers.trained(optimizer, params, gradient, jnp.arange(count + bad))[0][1]


def fields_of_ours(state):
    """The arrays directly in the states of this library, by the state's name and the field's."""
    return [
        (f"{node.kind.__name__}.{name}", jax.tree.leaves(field))
        for node in nodes_of(state)
        if node.kind.__module__.startswith("optax_largebatch.")
        and node.kind.__name__.endswith("State")
        for name, field in node.fields.items()
        if name != "inner_state"
    ]


@pytest.mark.parametrize("name", KEEPING)
def test_every_field_goes_over_or_is_said_to_begin_anew(name):
    optimizer, leaves_out = KEEPING[name], name in ("skipping", "loss scale")
    params = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS) if name == "masters" else PARAMS
    state = state_after(optimizer, params, 2 * STEPS, bad=leaves_out)
    first = fields_of_ours(optimizer.init(params))
    compared = optimizer if sums_gradients(state) else None
    warns = contextlib.nullcontext()
    if name in WARNED:
        warns = pytest.warns(match=f"what {WARNED[name]} of state have collected does not go over")
    with warns:
        adopted = lb.adopt_state(optimizer, params, state, old_optimizer=compared)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, state)
    triples = zip(fields_of_ours(state), fields_of_ours(adopted), first, strict=True)
    for (field, old), (_, new), (_, at_first) in triples:
        begins_anew = FIELDS[field] == "begins anew"
        chex.assert_trees_all_equal(new, at_first if begins_anew else old)
        assert field.partition(".")[2] in UNMOVED or not_equal(old, at_first), field


WARNED = {
    "noise scale": "MeasureNoiseScaleState",
    "skipping": "SkipBadStepsState",
    "loss scale": "DynamicLossScaleState",
}
UNMOVED = ("micro_step", "examples", "small_batches", "gave_up")
"""Fields that are as at first: there are no micro-batches now, and few steps were left out."""


def test_numbers_of_other_blocks_are_refused():
    state = state_after(lb.cain(0.1), {"layers": PARAMS["kernel"]})
    new = lb.cain(0.1, stacked={"layers": 0})
    with pytest.raises(ValueError, match=r"RmsState in state has the shapes .* the same `stacked`"):
        lb.adopt_state(new, {"layers": PARAMS["kernel"]}, state)


def test_masters_keep_their_precision():
    wrapped = lb.master_weights(LAMB)
    halves = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    thirds = jax.tree.map(lambda x: x / 3, PARAMS)
    state = wrapped.init(halves)._replace(master=thirds)
    chex.assert_trees_all_equal(lb.adopt_state(wrapped, halves, state).master, thirds)
    without = wrapped.init(PARAMS)  # parameters of float32 need none
    adopted = lb.adopt_state(wrapped, halves, without)
    chex.assert_trees_all_equal(adopted.master, wrapped.init(halves).master)


ENDING = {
    "AverageWeightsState": (averaging(LAMB), LAMB),
    "NormalizeNeuronsState": (
        KEEPING["NorMuon"],
        beside_lamb(lb.chain(lb.orthogonalize_momentum(), RATE)),
    ),
}


@pytest.mark.parametrize("name", ENDING)
def test_what_ends_with_its_link_is_said(name):
    old, new = ENDING[name]
    with pytest.warns(match=f"what {name} of state have collected"):
        lb.adopt_state(new, PARAMS, state_after(old))


def not_equal(arrays, others):
    return any(np.any(np.asarray(x) != y) for x, y in zip(arrays, others, strict=True))


def test_no_field_is_forgotten():
    """A new state, or one in a new optimizer, needs a row for each of its fields."""
    states = [getattr(lb.states, name) for name in lb.states.__all__]
    public = [f"{state.__name__}.{field}" for state in states for field in state._fields]
    optimizers = [*KEEPING.values(), *(entry.make() for entry in OPTIMIZERS.values())]
    inside = {field for x in optimizers for field, _ in fields_of_ours(x.init(PARAMS))}
    assert {*public} == FIELDS.keys() >= inside
    anew = {field.partition(".")[0] for field, what in FIELDS.items() if what == "begins anew"}
    # Between two macro-batches nothing is accumulated.
    assert anew - {"AccumulateGradientsState"} == {*WARNED.values()}
    tried = {field for x in KEEPING.values() for field, _ in fields_of_ours(x.init(PARAMS))}
    assert all("inner_state" in field for field in FIELDS.keys() - tried)


WITH_AVERAGE = {
    "the same": (averaging(LAMB), averaging(LAMB)),
    "of optax, in a wrapper": (averaging(optax.adam(SCHEDULE)), lb.skip_bad_steps(averaging(LAMB))),
    "of some": (without_bias(averaging(LAMB)), masked(averaging(LAMB))),
    "of fewer": (averaging(LAMB), without_bias(averaging(LAMB))),
}


@pytest.mark.parametrize("name", WITH_AVERAGE)
def test_an_average_goes_on(name):
    old, new = WITH_AVERAGE[name]
    state = state_after(old)
    adopted = lb.adopt_state(new, PARAMS, state)
    chex.assert_trees_all_equal(lb.adopt_state(new, PARAMS, as_orbax(state)), adopted)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, new.init(PARAMS))
    for field in ("average", "steps", "weight"):
        now, before = (optax.tree.get(tree, field) for tree in (adopted, state))
        if name == "of fewer" and field == "average":
            now, before = now["kernel"], before["kernel"]
        chex.assert_trees_all_equal(now, before)
    assert optax.tree.get(adopted, "steps") == STEPS


def test_a_first_average_counts_the_steps_of_the_run():
    """Its half-life may be a schedule of them. It begins with the weights of the next step."""
    asked = []

    def half_life(step):
        asked.append(int(step))
        return 2.0

    new = lb.average_weights(LAMB, half_life=half_life)
    adopted = lb.adopt_state(new, PARAMS, state_after(LAMB))
    assert (int(adopted.steps), float(adopted.weight)) == (STEPS, 0)
    updates, state = new.update(gradients(1)[0], adopted, PARAMS)
    moved = optax.apply_updates(PARAMS, updates)
    chex.assert_trees_all_close(state.average, moved, rtol=1e-6)
    assert asked[-1] == STEPS


def test_an_average_of_fewer_parameters_is_refused():
    state = state_after(without_bias(averaging(LAMB)))
    everywhere = optax.chain(averaging(optax.identity()), without_bias(LAMB))
    with pytest.raises(ValueError, match="state must hold an average of all parameters of which"):
        lb.adopt_state(everywhere, PARAMS, state)


@pytest.mark.parametrize("old", [LAMB, lb.stochastic_rounding(LAMB, seed=3)])
def test_random_numbers_go_on(old):
    new = lb.stochastic_rounding(LAMB)
    assert lb.adopt_state(new, PARAMS, state_after(old)).steps == STEPS
    calls = lb.stochastic_rounding(lb.accumulate_gradients(LAMB, every=2))
    adopted = lb.adopt_state(calls, PARAMS, state_after(calls, count=2 * STEPS))
    assert (int(adopted.steps), int(adopted.inner_state.macro_step)) == (2 * STEPS, STEPS)


MATRICES = helpers.drawn({"first": (8, 24), "second": (6, 4), "third": (5, 3)})
TREES = {
    "dict": MATRICES,
    "tuples of one": tuple((x,) for x in MATRICES.values()),
    "nested": {"a": (MATRICES["first"], MATRICES["second"]), "b": MATRICES["third"]},
}


def several(first, second):
    """Two optimizers, each for some of the parameters, and one that is not moved."""

    def labels(params):
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(["second", "none", "first"][: len(leaves)])

    return optax.partition({"first": first, "second": second, "none": optax.set_to_zero()}, labels)


NEURONS = {
    "alone": norm_muon(),
    "several": several(norm_muon(), norm_muon()),
    "muonh": lb.chain(
        lb.orthogonalize_momentum(), lb.normalize_neurons(), lb.hyperball(0.1, stacked={})
    ),
}


def moments_of_neurons(state):
    """The second moments of all neurons, state by state."""
    nodes = [node for node in nodes_of(state) if node.kind is lb.states.NormalizeNeuronsState]
    return [x for node in nodes for x in jax.tree.leaves(node.fields["nu"])]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", NEURONS)
def test_moments_of_neurons_go_on(name, tree):
    optimizer, params = NEURONS[name], TREES[tree]
    state = state_after(optimizer, params)
    before = moments_of_neurons(state)
    assert all(jnp.all(x > 0) for x in before)
    for carried in (state, as_orbax(state)):
        adopted = lb.adopt_state(optimizer, params, carried)
        chex.assert_trees_all_equal(moments_of_neurons(adopted), before)


def test_moments_of_neurons_go_to_the_parameters_that_they_are_of():
    """From one optimizer for all to two, and back."""
    one, two = NEURONS["alone"], several(norm_muon(), norm_muon())
    state = state_after(one, MATRICES)
    apart = lb.adopt_state(two, MATRICES, state)
    first, _, third = moments_of_neurons(state)
    chex.assert_trees_all_equal(moments_of_neurons(apart), [third, first])
    together = optax.masked(one, {"first": True, "second": False, "third": True})
    adopted = lb.adopt_state(together, MATRICES, apart)
    chex.assert_trees_all_equal(moments_of_neurons(adopted), [first, third])


def test_moments_of_other_neurons_are_refused():
    state = state_after(norm_muon(side="longer"), MATRICES)
    with pytest.raises(ValueError, match="the neurons of 'second' must be those of before"):
        lb.adopt_state(NEURONS["alone"], MATRICES, state)


def test_moments_of_neurons_begin_at_zero_if_there_were_none():
    state = state_after(lb.chain(lb.orthogonalize_momentum(), RATE), MATRICES)
    adopted = lb.adopt_state(NEURONS["alone"], MATRICES, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, NEURONS["alone"].init(MATRICES))
    assert not any(jnp.any(x) for x in moments_of_neurons(adopted))


def test_moments_of_neurons_lie_where_init_puts_them():
    optimizer, params = NEURONS["alone"], {"first": MATRICES["first"]}
    state = state_after(optimizer, params)
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    on_mesh = jax.device_put(params, NamedSharding(mesh, P("x", "y")))
    adopted = lb.adopt_state(optimizer, on_mesh, state)
    assert same_places(adopted[1], optimizer.init(on_mesh)[1])
    chex.assert_trees_all_equal(moments_of_neurons(adopted), moments_of_neurons(state))


def test_moments_of_neurons_go_on_if_init_is_compiled():
    optimizer = NEURONS["alone"]
    compiled = optimizer._replace(init=jax.jit(optimizer.init))
    state = state_after(optimizer, MATRICES)
    adopted = lb.adopt_state(compiled, MATRICES, state)
    chex.assert_trees_all_equal(moments_of_neurons(adopted), moments_of_neurons(state))
