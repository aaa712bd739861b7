"""What an optimizer will do with each parameter, and what looks wrong."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch import engine

PARAMS = {
    "embed": jnp.ones((12, 8)),
    "final_rmsnorm": jnp.ones(8),
    "head": jnp.ones((8, 6)),
    "layers": {
        "bias": jnp.zeros((7, 16)),
        "heads": jnp.ones((7, 8, 2, 8)),
        "kernel": jnp.ones((7, 8, 16)),
    },
}
STACKED = {"layers/": 0}
LAYERS = lb.matching("layers/")
RATE = optax.linear_schedule(0.0, 0.02, 10)
KERNELS = ~lb.matching_kinds("bias", "norm")


def explained(optimizer, params=PARAMS):
    return {one.name: one for one in lb.explain(optimizer, params).parameters}


def column(optimizer, field, params=PARAMS):
    return [getattr(one, field) for one in explained(optimizer, params).values()]


def muonh(**settings):
    return lb.muonh(
        RATE,
        adamh_mask=lb.matching("head$"),
        matrix_mask=LAYERS,
        matrix_axes={"layers/heads": (1, (2, 3))},
        stacked=STACKED,
        **settings,
    )


ACCUMULATED = lb.accumulate_gradients(muonh(), every=2)
WRAPPED = {
    "alone": muonh(),
    "in a chain": optax.chain(optax.clip_by_global_norm(1.0), muonh()),
    "in wrappers": lb.master_weights(lb.dynamic_loss_scale(lb.skip_bad_steps(ACCUMULATED))),
    "MultiSteps": optax.MultiSteps(muonh(), 2),
    "with specs": lb.with_partition_specs(muonh(), jax.sharding.PartitionSpec()),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("shapes", [False, True], ids=["arrays", "shapes"])
def test_who_moves_what(name, shapes):
    params = jax.eval_shape(lambda: PARAMS) if shapes else PARAMS
    of_each = explained(WRAPPED[name], params)
    assert {
        name: (one.direction, one.length, one.blocks, one.matrices, round(13 * one.rate, 5))
        for name, one in of_each.items()
    } == {
        "embed": ("adam", "", 1, {}, 3),
        "final_rmsnorm": ("adam", "", 1, {}, 3),
        "head": ("adam", "sphere", 1, {}, 13),
        "layers/bias": ("adam", "", 7, {}, 3),
        "layers/heads": ("muon", "sphere", 7, {(8, 16): 7}, 13),
        "layers/kernel": ("muon", "sphere", 7, {(8, 16): 7}, 13),
    }
    assert not any(one.decayed or one.notes or one.undeclared for one in of_each.values())
    jax.eval_shape(lambda params: explained(WRAPPED[name], params) and params, PARAMS)  # in jit


def test_what_others_move_is_not_known():
    of_each = explained(muonh(others=optax.adamw(1e-3)))
    moved = ["embed", "final_rmsnorm", "layers/bias"]
    assert [name for name, one in of_each.items() if one.direction == "?"] == moved
    assert [one.blocks for one in of_each.values()] == [1, 1, 1, 7, 7, 7]
    ours = muonh(others=lb.lamb(1e-3, stacked=STACKED, weight_decay=0.1))
    ratio = "trust ratio"
    assert column(ours, "length") == [ratio, ratio, "sphere", ratio, "sphere", "sphere"]
    assert set(column(optax.adamw(0.1), "direction")) == {"?"}
    assert column(optax.adamw(0.1), "notes") == [()] * 6


def test_rates_that_are_injected_are_not_known():
    injected = optax.inject_hyperparams(lb.lamb, static_args=("stacked",))(0.1, stacked=STACKED)
    assert column(injected, "rate") == [None] * 6
    assert column(injected, "length") == ["trust ratio"] * 6


def test_a_schedule_that_parameters_share_is_asked_as_often_as_for_one():
    asked = []

    def rate(step):
        asked.append(step)
        return 0.1

    times = []
    for number in (1, 9):
        asked.clear()
        lb.explain(lb.lamb(rate), {str(n): jnp.ones((2, 2)) for n in range(number)})
        times.append(len(asked))
    assert times[0] == times[1] > 0


def test_the_highest_rates_are_compared():
    rate = lb.warmup_decay(1e-2, total_steps=3000, warmup_steps=300)  # 0 in the first step
    optimizer = lb.muonh(rate, others=3e-3, stacked=STACKED)
    shares = [0.3 if x == "adam" else 1 for x in column(optimizer, "direction")]
    assert column(optimizer, "rate") == pytest.approx(shares)


def test_decay_and_groups():
    groups = lb.param_groups(
        {"params": lb.matching("embed"), "learning_rate_scale": 0.25},
        {"params": lb.matching("head$"), "weight_decay": 0.0},
    )
    optimizer = lb.lamb(
        RATE, weight_decay=0.1, weight_decay_mask=KERNELS, groups=groups, stacked=STACKED
    )
    assert column(optimizer, "decayed") == [True, False, False, False, True, True]
    assert column(optimizer, "rate") == [0.25, 1, 1, 1, 1, 1]
    assert not any(column(lb.lamb(RATE, stacked=STACKED), "decayed"))
    assert all(column(lb.lars(RATE, weight_decay=0.1, stacked=STACKED), "decayed"))


DIRECTIONS = {
    "lamb": ("adam", "trust ratio"),
    "lans": ("adam", "trust ratio"),
    "lars": ("momentum", "trust ratio"),
    "muon": ("muon", ""),
    "adamh": ("adam", "sphere"),
    "eve": ("adam", ""),
    "cain": ("adam", "size"),
    "scaled_adam": ("adam", "size"),
    "learned_gradient": ("learned matrices", "size"),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_directions_of_other_optimizers(name):
    one = explained(getattr(lb, name)(0.1, stacked=STACKED))["layers/kernel"]
    assert (one.direction, one.length) == DIRECTIONS[name]


def marked(optimizer, params=PARAMS):
    """The names that have a mark, and the words with which their reasons begin."""
    return {
        name: [" ".join(note.split()[:3]) for note in one.notes]
        for name, one in explained(optimizer, params).items()
        if one.notes
    }


def test_foreign_transforms_have_the_names_that_they_give_themselves():
    """In a chain of ours, where no transform of ours gives the direction."""
    params = {"kernel": jnp.ones((2, 2))}
    rate = lb.scale_by_learning_rate(0.1)
    for links, direction in (
        ([optax.scale_by_lion(), rate], "scale_by_lion"),
        ([own_signs(), optax.scale_by_rms(), rate], "own_signs + scale_by_rms"),
        ([own_halves(), rate], "own_halves"),
        ([optax.scale_by_lion(), lb.scale_by_adam(), rate], "adam"),
        ([lb.clip_by_global_norm(1.0), rate], "gradient"),
    ):
        (line,) = lb.explain(lb.chain(*links), params).parameters
        assert line.direction == direction


def own_signs():
    def update(updates, state, params=None):
        return jax.tree.map(jnp.sign, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def own_halves():
    """By the engine."""

    def leaf(update, at):
        return 0.5 * update, at.state

    return engine.transformation(leaf)


def test_vectors_that_are_decayed_or_adapted():
    optimizer = lb.lamb(0.1, weight_decay=0.1, stacked=STACKED)
    vectors = ["has one axis,", "has one axis,"]
    assert marked(optimizer) == {"final_rmsnorm": vectors, "layers/bias": vectors}
    masks = {"weight_decay_mask": KERNELS, "trust_ratio_mask": KERNELS}
    assert not marked(lb.lamb(0.1, weight_decay=0.1, stacked=STACKED, **masks))


def test_what_muon_should_not_move():
    assert marked(lb.muonh(0.1, stacked=STACKED)) == {
        "embed": ["is an embedding"],
        "head": ["is an embedding"],
        "layers/heads": ["has 3 axes,"],
    }


def test_what_should_not_stay_on_a_sphere():
    params = PARAMS | {"low": jnp.ones((4, 4), "bfloat16"), "new": jnp.zeros((4, 4))}
    everything = lb.adamh(0.1, adamh_mask=lb.at_least_ndim(0), stacked=STACKED)
    assert marked(everything, params) == {
        "embed": ["is an embedding:"],
        "final_rmsnorm": ["has one axis:"],
        "layers/bias": ["has one axis:"],
        "low": ["is bfloat16: most"],
    }


@pytest.mark.parametrize(
    ("optimizer", "harmed"),
    [
        (lb.lamb(0.1, trust_ratio_mask=lb.at_least_ndim(3), stacked={}), ["heads", "kernel"]),
        (lb.muon(0.1, stacked={}), ["bias", "heads", "kernel"]),
        (lb.chain(lb.scale_by_adam(), lb.scale_by_learning_rate(0.1)), []),
    ],
)
def test_stacks_that_are_not_declared(optimizer, harmed):
    found = [name for name, one in explained(optimizer).items() if one.undeclared]
    assert found == [f"layers/{name}" for name in harmed]
    printed = str(lb.explain(optimizer, PARAMS))
    assert ("stacked=stacked_layers({'layers/': 0})" in printed) == bool(harmed)


def test_a_mask_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="'attention' matches no parameter"):
        lb.explain(lb.lamb(0.1, weight_decay_mask=lb.matching("attention"), stacked={}), PARAMS)


def test_a_table_with_reasons():
    optimizer = lb.muonh(0.1, matrix_mask=~lb.matching("embed"), stacked=STACKED)
    assert str(lb.explain(optimizer, PARAMS)).splitlines() == [
        "parameter      shape    blocks     direction  length  decay  rate   state",
        "embed          12x8     1          adam       -       -      0.231  8 B",
        "final_rmsnorm  8        1          adam       -       -      0.231  8 B",
        "head           8x6      1 of 8x6   muon       sphere  -      1      4 B    !",
        "layers/bias    7x16     7          adam       -       -      0.231  8 B",
        "layers/heads   7x8x2x8  7          adam       -       -      0.231  8 B    !",
        "layers/kernel  7x8x16   7 of 8x16  muon       sphere  -      1      4 B",
        "6 parameters, 2056 numbers (adam: 1112; muon, sphere: 944)",
        "12,900 bytes of state on a device",
        "! head: is an embedding or a head, which Adam moves in most recipes: matrix_mask, or "
        "embeddings= of planned_optimizer",
        "! layers/heads: has 3 axes, and is no matrix to Muon. If it is one, say which axes are "
        "rows and columns: matrix_axes={'(^|/)heads$': (2, 3)}",
    ]


def test_matrices_that_share_a_norm_and_a_table_of_positions():
    params = {"experts": jnp.ones((3, 4, 8)), "pos": jnp.ones((9, 4))}
    optimizer = lb.muonh(0.1, stacked={}, matrix_axes={"experts": (1, 2)})
    assert "3 of 4x8  muon       1 x sphere" in str(lb.explain(optimizer, params))
    assert marked(optimizer, params) == {"pos": ["is an embedding"]}


def test_a_name_of_two_lines_is_escaped():
    assert "a\\nb" in str(lb.explain(lb.lamb(0.1), {"a\nb": jnp.ones((2, 2))}))


OF_STATE = {
    "muonh": (lb.muonh(0.1, matrix_mask=lb.matching("kernel")), 4, 8),
    "optax's adamw": (optax.adamw(0.1), 8, 8),
    "one moment in bfloat16": (lb.lamb(0.1, mu_dtype="bfloat16"), 6, 6),
    "accumulated": (lb.accumulate_gradients(lb.lamb(0.1), every=4), 12, 12),
}
"""An optimizer, and the bytes that it keeps for each number of a kernel and of a bias."""


@pytest.mark.parametrize("name", OF_STATE)
@pytest.mark.parametrize("devices", [1, 8])
def test_bytes_of_state(name, devices):
    """Of each parameter and in all, as the arrays have on one device."""
    optimizer, *each = OF_STATE[name]
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    specs = {"kernel": PartitionSpec(None, "data"), "bias": PartitionSpec()}
    params = {"kernel": jnp.ones((4, 64)), "bias": jnp.ones(64)}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    params = jax.device_put(params, shardings)
    explained = lb.explain(optimizer, params)
    kernel, bias = ({line.name: line for line in explained.parameters}[key] for key in specs)
    assert kernel.state_bytes == each[0] * 256 // devices
    assert bias.state_bytes == each[1] * 64
    layout = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=layout)(params)
    arrays = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(state)]
    assert explained.state_bytes == sum(array.nbytes for array in arrays)
    assert f"\n{explained.state_bytes:,} bytes of state on a device" in str(explained)
