"""The same training in plain dictionaries, Flax linen, Flax nnx and Equinox."""

from collections.abc import Callable
import functools
import itertools

import equinox as eqx
from flax import linen, nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

WIDTHS = (6, 5, 4)
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Without XLA's optimizations, which take longer than all steps here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_array(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


BATCHES = [(random_array(8, WIDTHS[0]), random_array(8, WIDTHS[-1])) for _ in range(20)]


def squared_error(outputs, targets):
    return jnp.mean(jnp.square(outputs - targets))


# One network, four times: blocks of a dense layer, a layer norm and tanh.


def plain_block_params(inputs, outputs):
    return {
        "dense": {"kernel": random_array(inputs, outputs)},
        "norm": {"scale": random_array(outputs), "bias": random_array(outputs)},
    }


PLAIN_PARAMS = {"blocks": list(itertools.starmap(plain_block_params, itertools.pairwise(WIDTHS)))}


def plain_net(params, x):
    for block in params["blocks"]:
        x = x @ block["dense"]["kernel"]
        mean = jnp.mean(x)
        inverse_deviation = jax.lax.rsqrt(jnp.mean(jnp.square(x - mean)) + 1e-6)
        x = (x - mean) * (inverse_deviation * block["norm"]["scale"]) + block["norm"]["bias"]
        x = jnp.tanh(x)
    return x


class LinenBlock(linen.Module):
    outputs: int
    kernel_init: Callable

    def setup(self):
        self.dense = linen.Dense(self.outputs, use_bias=False, kernel_init=self.kernel_init)
        self.norm = linen.LayerNorm(
            use_fast_variance=False, bias_init=linen.initializers.normal(1.0)
        )

    def __call__(self, x):
        return jnp.tanh(self.norm(self.dense(x)))


def in_turn(net, x):
    """What comes out of the last block."""
    return functools.reduce(lambda x, block: block(x), net.blocks, x)


class LinenNet(linen.Module):
    kernel_init: Callable = linen.initializers.lecun_normal()
    __call__ = in_turn

    def setup(self):
        self.blocks = [LinenBlock(outputs, self.kernel_init) for outputs in WIDTHS[1:]]


LINEN_NET = LinenNet()
BOXED_NET = LinenNet(linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model")))


# Flax before 0.12 has no list of its own and takes Python's.
NnxList = getattr(nnx, "List", list)


class NnxBlock(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.dense = nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(outputs, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.dense(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = NnxList([NnxBlock(*widths, rngs) for widths in itertools.pairwise(WIDTHS)])

    __call__ = in_turn


class EquinoxBlock(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, inputs, outputs, key):
        self.dense = eqx.nn.Linear(inputs, outputs, use_bias=False, key=key)
        self.norm = eqx.nn.LayerNorm(outputs, eps=1e-6)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.dense(x)))


class EquinoxNet(eqx.Module):
    blocks: list[EquinoxBlock]

    def __init__(self, key):
        self.blocks = [EquinoxBlock(*widths, key) for widths in itertools.pairwise(WIDTHS)]

    __call__ = in_turn


# The same weights in all of them.


def common_name(name):
    """What the plain dictionaries call a parameter that a framework calls `name`."""
    name = name.replace("blocks_", "blocks/")
    return name.replace("norm/weight", "norm/scale").replace("dense/weight", "dense/kernel")


def name_of(path):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return common_name(name.removesuffix("/value"))


def transposed_like(array, like):
    """Equinox keeps a kernel as (outputs, inputs), the others as (inputs, outputs)."""
    return array if array.shape == like.shape else array.T


WEIGHTS = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(PLAIN_PARAMS)}


def with_weights(params):
    """The parameters of any framework with the values of `WEIGHTS`."""
    return jax.tree.map_with_path(
        lambda path, leaf: transposed_like(WEIGHTS[name_of(path)], leaf), params
    )


def weights_of(params):
    """The values of the parameters of any framework, named and shaped as in `WEIGHTS`."""
    named = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    return {name: transposed_like(leaf, WEIGHTS[name]) for name, leaf in named.items()}


# The training loop of each framework, as its users write it.


def train_plain(optimizer, batches=BATCHES):
    @jax.jit
    def step(params, state, x, y):
        def loss(params):
            return squared_error(jax.vmap(plain_net, (None, 0))(params, x), y)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = PLAIN_PARAMS
    state = optimizer.init(params)
    for x, y in batches:
        params, state = step(params, state, x, y)
    return weights_of(params)


@functools.cache
def linen_params(net):
    return with_weights(net.init(jax.random.key(0), BATCHES[0][0])["params"])


def linen_step(state, batch):
    def loss(params):
        x, y = batch
        return squared_error(state.apply_fn({"params": params}, x), y)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def linen_state(optimizer, net=LINEN_NET, wrap=dict):
    return TrainState.create(apply_fn=net.apply, params=wrap(linen_params(net)), tx=optimizer)


def train_linen(optimizer, batches=BATCHES, net=LINEN_NET, wrap=dict):
    state = linen_state(optimizer, net, wrap)
    step = jax.jit(linen_step)
    for batch in batches:
        state = step(state, batch)
    return weights_of(state.params)


def train_nnx(optimizer, batches=BATCHES):
    @nnx.jit
    def step(model, state, x, y):
        grads = nnx.grad(lambda model: squared_error(model(x), y))(model)
        state.update(model, grads)

    model = NnxNet(nnx.Rngs(0))
    nnx.update(model, with_weights(nnx.state(model, nnx.Param)))
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for x, y in batches:
        step(model, state, x, y)
    return weights_of(nnx.state(model, nnx.Param))


@functools.cache
def equinox_net():
    return with_weights(EquinoxNet(jax.random.key(0)))


def every_array(model):
    return eqx.filter(model, eqx.is_inexact_array)


def train_equinox(optimizer, batches=BATCHES):
    @eqx.filter_jit
    def step(model, state, x, y):
        grads = eqx.filter_grad(lambda model: squared_error(jax.vmap(model)(x), y))(model)
        updates, state = optimizer.update(grads, state, every_array(model))
        return eqx.apply_updates(model, updates), state

    model = equinox_net()
    state = optimizer.init(every_array(model))
    for x, y in batches:
        model, state = step(model, state, x, y)
    return weights_of(every_array(model))


FRAMEWORKS = {
    "plain": train_plain,
    "linen": train_linen,
    "boxed linen": functools.partial(train_linen, net=BOXED_NET),
    "frozen linen": functools.partial(train_linen, wrap=FrozenDict),
    "nnx": train_nnx,
    "equinox": train_equinox,
}

# The same numbers.

MASKED_DECAY = {
    "weight_decay": 0.01,
    "weight_decay_mask": ~lb.matching("norm"),
    "trust_ratio_mask": lb.matching("kernel|weight") & lb.at_least_ndim(2),
}
OPTIMIZERS = {
    "lamb": lb.lamb(0.003, **MASKED_DECAY),
    "lbsgd": lb.lbsgd(0.01, momentum=0.9, **MASKED_DECAY, batch_scale=2, warmup_strategy="lars"),
}


@functools.cache
def trained(framework, name):
    return FRAMEWORKS[framework](OPTIMIZERS[name])


def assert_same(actual, expected, tolerance):
    """The error of a parameter is relative to its largest element."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = np.abs(actual[name] - value).max()
        assert error <= tolerance * np.abs(value).max(), name


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS.keys() - {"plain"}))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_plain_dictionaries(name, framework):
    """To the last bits, but for Equinox, whose layers multiply in another order."""
    tolerance = 1e-6 if framework == "equinox" else 0.0
    assert_same(trained(framework, name), trained("plain", name), tolerance)


# Rules.


def names_ending(end):
    return {name for name in WEIGHTS if name.endswith(end)}


KERNELS = names_ending("kernel")
SCALES = names_ending("scale")
BIASES = names_ending("bias")
RULES = {
    ~lb.matching("norm"): KERNELS,
    lb.at_least_ndim(2): KERNELS,
    ~lb.at_least_ndim(2): SCALES | BIASES,
    lb.matching("(kernel|weight)$") & lb.at_least_ndim(2): KERNELS,
    lb.matching("norm") & ~lb.matching("bias$"): SCALES,
    lb.matching("bias$") | lb.at_least_ndim(2): BIASES | KERNELS,
    lb.matching("^blocks[/_]0/") & ~lb.matching("norm"): {"blocks/0/dense/kernel"},
}
RULES_WITH_NAMES_OF_FLAX = {
    ~lb.matching("bias", "scale"): KERNELS,
    lb.matching("kernel$", "scale$"): KERNELS | SCALES,
}


def recording(rule, selections):
    """`rule`, with the names that it selects appended to `selections` each time."""

    def select(named):
        choices = rule.select(named)
        chosen = zip(named, choices, strict=True)
        present = [name for (name, leaf), choice in chosen if choice and leaf is not None]
        selections.append({common_name(name) for name in present})
        return choices

    return lb.Rule(repr(rule), select)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rules_select_the_same_parameters_everywhere(framework):
    """At first and in a step; all rules in one optimizer, which is compiled once."""
    expected = RULES | (RULES_WITH_NAMES_OF_FLAX if framework != "equinox" else {})
    found = {rule: [] for rule in expected}
    decays = [lb.add_decayed_weights(0.5, recording(rule, found[rule])) for rule in expected]
    FRAMEWORKS[framework](optax.chain(*decays, optax.scale(-1.0)), BATCHES[:1])
    assert found == {rule: [names, names] for rule, names in expected.items()}


def test_equinox_is_told_that_its_scales_are_called_weight():
    with pytest.raises(ValueError, match=r"'scale' matches no parameter.*blocks/0/norm/weight"):
        train_equinox(lb.lamb(0.1, trust_ratio_mask=~lb.matching("bias", "scale")), BATCHES[:1])


# Boxes and frozen dictionaries of linen.


@pytest.mark.parametrize(
    ("net", "wrap"), [(BOXED_NET, dict), (LINEN_NET, FrozenDict)], ids=["boxed", "frozen"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_keeps_boxes_and_frozen_dictionaries(name, net, wrap):
    before = linen_state(OPTIMIZERS[name], net, wrap)
    params, state = before.params, before.opt_state
    updates, _ = jax.eval_shape(before.tx.update, params, state, params)
    after = jax.eval_shape(linen_step, before, BATCHES[0])
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(before)


# Wrappers of optax that hide parameters.

MATRICES = lb.at_least_ndim(2)
LAMB_OF_MATRICES = lb.lamb(
    0.003,
    weight_decay=0.01,
    weight_decay_mask=~lb.matching("norm"),
    groups=lb.param_groups({"params": lb.matching("bias"), "weight_decay": 0.0}),
)
LARS_OF_VECTORS = lb.lars(
    0.03,
    weight_decay=0.01,
    weight_decay_mask=~lb.matching("kernel|dense/weight"),
    trust_ratio_mask=lb.matching("norm"),
)
PARTITIONED = optax.partition({True: LAMB_OF_MATRICES, False: LARS_OF_VECTORS}, MATRICES.mask)


@pytest.mark.parametrize(
    "framework",
    [
        "boxed linen",
        "equinox",
        pytest.param(
            "nnx",
            marks=pytest.mark.skipif(
                NnxList is list, reason="nnx.Optimizer takes no masks of optax before Flax 0.12"
            ),
        ),
    ],
)
def test_a_partition_trains_the_same_everywhere(framework):
    assert_same(FRAMEWORKS[framework](PARTITIONED), train_plain(PARTITIONED), 1e-6)


def test_a_pattern_that_matches_nothing_is_an_error_under_a_mask_too():
    optimizer = lb.lamb(0.1, weight_decay_mask=~lb.matching("nrom"))
    with pytest.raises(ValueError, match="'nrom' matches no parameter"):
        optax.masked(optimizer, MATRICES.mask).init(PLAIN_PARAMS)
