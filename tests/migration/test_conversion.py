"""States through a change of the parameters."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import read_back, slow_but
from tests.migration.changes import (
    OPTIMIZERS,
    apart,
    before,
    begun,
    halves,
    join,
    make,
    split,
    stack,
)
from tests.migration.switches import PARAMS, SCHEDULE, as_orbax, state_after

KERNEL = {"kernel": PARAMS["kernel"]}
QUICK = ("muonh", "NorMuon", "lans")


def adopted(old, new, params, state, convert, **settings):
    """The new parameters, and the state that goes with them."""
    settings = {"old_params": params, "old_optimizer": old, "step": 2} | settings
    moved = convert(params)
    return moved, lb.adopt_state(new, moved, state, convert=convert, **settings)


@pytest.mark.parametrize("carrier", [lambda state: state, as_orbax], ids=["typed", "untyped"])
@pytest.mark.parametrize(
    ("layout", "there", "back"), [("stacked", stack, apart), ("split", split, join)]
)
@pytest.mark.parametrize("name", slow_but(QUICK, OPTIMIZERS))
def test_there_and_back_is_the_same_state(name, layout, there, back, carrier):
    run = before(name, dtype="float32")
    optimizer, other = make(name), make(name, layout=layout)
    moved, state = adopted(optimizer, other, run.params, carrier(run.state), there, step=run.steps)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, other.init(moved))
    again = adopted(other, optimizer, moved, carrier(state), back, step=run.steps)
    chex.assert_trees_all_equal(again, (run.params, run.state))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="Orbax calls it for copies on devices")
def test_wrappers_go_through(tmp_path):
    """On other devices, from a checkpoint without types."""

    def wrapped(inner):
        return lb.master_weights(lb.average_weights(inner, half_life=2))

    old, new = wrapped(make("lamb")), wrapped(make("lamb", layout="stacked"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    on_mesh = NamedSharding(mesh, P(None))
    params = jax.device_put(halves(begun(make("lamb"), 0, "float32").params), on_mesh)
    state = old.init(params)
    for _ in range(3):
        updates, state = old.update(params, state, params)
        params = optax.apply_updates(params, updates)
    restored = jax.device_put(read_back(state, tmp_path), jax.devices()[3])
    moved, after = adopted(old, new, params, restored, stack, step=3)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, new.init(moved))
    for field in ("master", "average", "mu", "nu"):
        before_it, after_it = (optax.tree.get(x, field) for x in (state, after))
        chex.assert_trees_all_equal(after_it, stack(before_it))
    average = lb.averaged_params(new, after, moved)
    chex.assert_trees_all_equal(average, stack(lb.averaged_params(old, state, params)))
    jax.jit(new.update)(moved, after, moved)


def test_new_rows_begin_at_zero_and_a_new_head_is_asked_for():
    optimizer, head = optax.adam(SCHEDULE), {"head": jnp.ones((3, 2))}

    def grown(params):
        return {"kernel": jnp.pad(params["kernel"], ((0, 1), (0, 0)))} | head

    state = state_after(optimizer)
    with pytest.raises(ValueError, match=r"no moments of 'head'.*forget=matching\('head'\)"):
        adopted(optimizer, optimizer, PARAMS, state, grown)
    _, after = adopted(optimizer, optimizer, PARAMS, state, grown, forget=lb.matching("head"))
    chex.assert_trees_all_equal(after[0].mu["kernel"], grown(state[0].mu)["kernel"])
    chex.assert_trees_all_equal(after[0].nu["head"], 0 * head["head"])
    assert after[0].count == 2


def test_what_is_forgotten_begins_with_its_count():
    """If the count is that of no other parameter."""
    labels = {"kernel": "body", "bias": "head"}
    adam = optax.adam(SCHEDULE)
    optimizer = lb.average_weights(
        optax.partition({"body": adam, "head": adam}, labels), half_life=2
    )
    state = state_after(optimizer)
    after = lb.adopt_state(optimizer, PARAMS, state, forget=lb.matching("bias"))
    counts = [x.inner_state[0].count for x in after.inner_state.inner_states.values()]
    assert sorted(map(int, counts)) == [0, 2]
    chex.assert_trees_all_equal(after.average["bias"], PARAMS["bias"])
    chex.assert_trees_all_equal(after.average["kernel"], state.average["kernel"])


COMPUTE = {
    "a sum": lambda x: x[0] + x[1],
    "a mean": lambda x: (x[0] + x[1]) / 2,
    "the larger one": lambda x: jnp.maximum(x[0], x[1]),
    "a cast": lambda x: x[0].astype("bfloat16"),
    "a cast that overflows": lambda x: x[0].astype("float16"),
    "a mean in a new row": lambda x: jnp.append(x[0], x.mean())[1:],
    "other numbers in each call": lambda x: jnp.asarray(np.random.default_rng().normal(size=3)),
}


@pytest.mark.parametrize("name", COMPUTE)
def test_a_function_that_computes_is_refused(name):
    optimizer = optax.adam(SCHEDULE)

    def convert(params):
        return {"kernel": COMPUTE[name](params["kernel"])}

    with pytest.raises(ValueError, match=r"convert must copy numbers.* some of 'kernel' are no"):
        adopted(optimizer, optimizer, KERNEL, optimizer.init(KERNEL), convert)


COPY = {
    "a slice": lambda x: x[:, 1:],
    "one twice": lambda x: jnp.stack([x, x]),
    "of NumPy": lambda x: np.flip(np.asarray(x)),
    "padded": lambda x: jnp.pad(x, 1, constant_values=7.0),
}


@pytest.mark.parametrize("name", COPY)
def test_a_function_that_copies(name):
    optimizer = optax.adam(SCHEDULE)
    state = optimizer.update(KERNEL, optimizer.init(KERNEL), KERNEL)[1]
    _, after = adopted(
        optimizer, optimizer, KERNEL, state, lambda tree: jax.tree.map(COPY[name], tree)
    )
    expected = COPY[name](state[0].mu["kernel"])
    chex.assert_trees_all_equal(after[0].mu["kernel"], jnp.where(expected == 7, 0, expected))


def test_radii_of_other_blocks_begin_anew_and_neurons_are_refused():
    params = {"joined": jnp.arange(1.0, 49.0).reshape(4, 12)}
    sphere = lb.muonh(SCHEDULE, radius="start")
    _, state = sphere.update(params, sphere.init(params), params)

    def halved(tree):
        return dict(zip(("a", "b"), jnp.split(tree["joined"], 2, axis=1), strict=True))

    _, after = adopted(sphere, sphere, params, state, halved)
    assert not jnp.any(after[1].radii)
    assert jnp.all(after[1].angles == state[1].angles)
    neurons = lb.chain(lb.orthogonalize_momentum(), lb.normalize_neurons(), optax.scale(-0.1))
    _, state = neurons.update(params, neurons.init(params), params)
    _, after = adopted(neurons, neurons, params, state, halved)
    chex.assert_trees_all_equal(after[1].nu[0][0], state[1].nu[0][0][:, :6])
    with pytest.raises(ValueError, match="neurons of 'joined' must be those of before"):
        adopted(neurons, neurons, params, state, lambda tree: jax.tree.map(jnp.transpose, tree))


def test_what_is_not_known_is_asked_for():
    lamb, cain, lars = lb.lamb(SCHEDULE), lb.cain(SCHEDULE), lb.lars(SCHEDULE)
    cases = [
        (lamb, lamb, {"old_optimizer": None}, "old_optimizer must be given with convert"),
        (lamb, lamb, {"old_params": None}, "convert must be a function .* with old_params"),
        (cain, cain, {}, "whose numbers no other optimizer keeps, and no convert moves"),
        (lars, lars, {"old_optimizer": None}, "old_optimizer must be given"),
    ]
    for old, new, settings, says in cases:
        with pytest.raises((TypeError, ValueError), match=says):
            adopted(old, new, KERNEL, old.init(KERNEL), lambda tree: tree, **settings)
    with pytest.raises(ValueError, match="convert must return a tree with the structure"):
        lb.adopt_state(lamb, PARAMS, lamb.init(KERNEL), old_params=KERNEL, convert=lambda x: x)
    with pytest.raises(ValueError, match="convert must be given where old_params have another"):
        lb.adopt_state(lamb, PARAMS, lamb.init(KERNEL), old_params=KERNEL)


def test_a_parameter_of_two_parts_is_refused():
    adams = {"a": optax.adam(SCHEDULE), "b": optax.adam(SCHEDULE)}
    old, new = optax.partition(adams, {"kernel": "a", "bias": "b"}), optax.adam(SCHEDULE)

    def joined(tree):
        return {"all": jnp.append(tree["kernel"], tree["bias"]), "kernel": tree["kernel"]}

    with pytest.raises(ValueError, match=r"'all': .* or of parameters that several parts"):
        adopted(old, new, PARAMS, state_after(old), joined)
