"""The gradient noise scale, where it is known."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb

needs_shard_map = pytest.mark.skipif(
    not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.8"
)

PARTS, SIZE, STEPS = 8, 4, 200
STACKED = lb.stacked_layers({"layers": 0})
NOISE = {"bias": [2.0], "kernel": [1.0], "layers": [0.5, 1.0, 2.0, 1.5]}
"""The standard deviation of the gradient of one example, of each layer."""


def network():
    rng = np.random.default_rng(0)
    shapes = {"bias": (5,), "kernel": (8, 4), "layers": (4, 8, 2)}
    return {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}


def truth(names=tuple(NOISE), layer=slice(None)):
    """The trace of the covariance over the squared norm of the gradient."""
    params = network()
    noise = sum(np.sum(np.square(spread(name))[layer]) for name in names)
    return noise / sum(np.sum(np.square(params[name][layer])) for name in names)


def spread(name):
    """The standard deviation of each element's gradient."""
    shape = network()[name].shape
    noise = np.reshape(np.asarray(NOISE[name], "float32"), (-1, *[1] * (len(shape) - 1)))
    return np.broadcast_to(noise, shape)


def loss(params, example):
    """A quadratic whose minimum is 0 on average, and elsewhere for every example."""
    return sum(jnp.sum(jnp.square(params[name] - example[name])) / 2 for name in params)


def mean_loss(params, examples):
    return jnp.mean(jax.vmap(loss, in_axes=(None, 0))(params, examples))


def examples(key, number):
    keys = dict(zip(NOISE, jax.random.split(key, len(NOISE)), strict=True))
    return {
        name: jax.random.normal(keys[name], (number, *leaf.shape)) * spread(name)[None]
        for name, leaf in network().items()
    }


def final(step, state):
    """The state after all steps, each with its batch of examples."""

    def body(state, key):
        return step(state, examples(key, PARTS * SIZE)), None

    return jax.lax.scan(body, state, jax.random.split(jax.random.key(1), STEPS))[0]


def parted(batch):
    return jax.tree.map(lambda x: x.reshape(PARTS, SIZE, *x.shape[1:]), batch)


@functools.cache
def from_micro_batches():
    params, watch = network(), lb.gradient_noise_scale(stacked=STACKED)
    optimizer = lb.accumulate_gradients(watch, PARTS, small_batches=True, stacked=STACKED)

    def step(state, batch):
        def micro(state, part):
            gradients = jax.grad(mean_loss)(params, part)
            return optimizer.update(gradients, state, params, examples=SIZE)[1], None

        return jax.lax.scan(micro, state, parted(batch))[0]

    return jax.jit(lambda state: final(step, state))(optimizer.init(params))


def of_devices(own, params, state, when=True):
    """The state after a step of which each device has gradients of its own."""
    mean = jax.lax.pmean(own, "data")
    parts = lb.small_batches_of_devices(
        own, params, "data", SIZE, mean=mean, when=when, stacked=STACKED
    )
    optimizer = lb.gradient_noise_scale(stacked=STACKED)
    return optimizer.update(mean, state, params, small_batches=parts)[1]


@functools.cache
def from_devices():
    params, optimizer = network(), lb.gradient_noise_scale(stacked=STACKED)

    def step(state, batch):
        own = jax.tree.map(lambda x: x[jax.lax.axis_index("data")], parted(batch))
        apart = jax.lax.pcast(params, "data", to="varying")
        return of_devices(jax.grad(mean_loss)(apart, own), params, state)

    run = jax.shard_map(
        lambda state: final(step, state), mesh=mesh("data"), in_specs=P(), out_specs=P()
    )
    return jax.jit(run)(optimizer.init(params))


def from_pmap():
    params, optimizer = network(), lb.gradient_noise_scale(stacked=STACKED)

    def step(state, batch):
        own = jax.tree.map(lambda x: x[jax.lax.axis_index("data")], parted(batch))
        return of_devices(jax.grad(mean_loss)(params, own), params, state)

    run = jax.pmap(lambda state, _: final(step, state), axis_name="data", in_axes=(None, 0))
    states = run(optimizer.init(params), jnp.zeros(PARTS))
    return jax.tree.map(lambda x: x[0], states)


@functools.cache
def from_examples(stacked=STACKED):
    params, optimizer = network(), lb.gradient_noise_scale(stacked=stacked)

    def step(state, batch):
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        mean = jax.tree.map(lambda x: x.mean(0), gradients)
        parts = lb.small_batches_of_examples(gradients, params, mean=mean, stacked=stacked)
        return optimizer.update(mean, state, params, small_batches=parts)[1]

    return jax.jit(lambda state: final(step, state))(optimizer.init(params))


def mesh(*names, shape=(PARTS,)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


SOURCES = {
    "micro-batches": from_micro_batches,
    "devices": pytest.param(from_devices, marks=needs_shard_map),
    "devices of pmap": pytest.param(from_pmap, marks=needs_shard_map),
    "examples": from_examples,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_is_within_a_tenth_of_the_truth_after_200_steps(source):
    params, state = network(), source()
    whole = lb.noise_scale(state)
    np.testing.assert_allclose(whole.noise_scale, truth(), rtol=0.1)
    squares = [np.sum(np.square(spread(name))) for name in NOISE]
    np.testing.assert_allclose(whole.noise, sum(squares), rtol=0.1)
    assert whole.low < truth() < whole.high
    assert whole.high / whole.low < 1.25
    layers = lb.layer_noise_scales(state, params, stacked=STACKED)
    for name in ("bias", "kernel"):
        np.testing.assert_allclose(layers[name].noise_scale, truth([name]), rtol=0.2)
    expected = [truth(["layers"], layer) for layer in range(4)]
    np.testing.assert_allclose(layers["layers"].noise_scale, expected, rtol=0.2)


@needs_shard_map
def test_eight_devices_give_the_number_of_one():
    one, eight = (lb.noise_scale(source()) for source in (from_micro_batches, from_devices))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), one, eight)


def test_layers_of_a_stack_have_the_numbers_of_layers_apart():
    params = network()
    layers = lb.layer_noise_scales(from_examples(), params, stacked=STACKED)
    whole = lb.layer_noise_scales(from_examples(None), params)
    for name in ("bias", "kernel"):
        np.testing.assert_array_equal(layers[name], whole[name])
    # The noise of a stack is that of its layers together, and so is its gradient.
    for field in ("noise", "signal"):
        np.testing.assert_allclose(
            getattr(layers["layers"], field).sum(), getattr(whole["layers"], field), rtol=1e-4
        )
    assert not np.isclose(layers["layers"].noise_scale[0], whole["layers"].noise_scale)


@functools.cache
def many_runs(steps, runs=400, decay=0.99):
    """Runs with a gradient of squared norm 1 and noise of 4 for an example, in 3 numbers."""
    params = jnp.full(3, 3**-0.5)
    transform = lb.gradient_noise_scale(decay)

    def step(state, key):
        own = params[None] + 2 * 3**-0.5 * jax.random.normal(key, (4, 3))
        parts = lb.small_batches_of_examples(own, params, mean=own.mean(0))
        return transform.update(own.mean(0), state, small_batches=parts)[1], None

    def run(key):
        return jax.lax.scan(step, transform.init(params), jax.random.split(key, steps))[0]

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), runs))


def test_the_averages_have_no_bias():
    """Over 400 runs of 30 steps, with the ratio of what they estimate."""
    state = many_runs(30)
    np.testing.assert_allclose(state.noise.mean(0), 4, rtol=0.02)
    np.testing.assert_allclose(state.signal.mean(0), 1, rtol=0.03)


@pytest.mark.parametrize("confidence", [0.6, 0.9])
def test_the_band_holds_the_truth_as_often_as_it_says(confidence):
    band = jax.vmap(functools.partial(lb.noise_scale, confidence=confidence))(many_runs(100))
    covered = np.mean((band.low < 4) & (band.high > 4))
    assert abs(covered - confidence) < 0.05


def test_averages_are_the_weighted_means_and_variances():
    """With the weights 1, decay, decay^2 and so on, back from the last step."""
    rng = np.random.default_rng(0)
    transform = lb.gradient_noise_scale(0.7)
    state, seen, step = transform.init(jnp.zeros(2)), [], jax.jit(transform.update)
    for _ in range(5):
        own = jnp.asarray(rng.normal(size=(3, 2)), "float32")
        parts = lb.small_batches_of_examples(own, jnp.zeros(2), batch_size=2, mean=own.mean(0))
        _, state = step(own.mean(0), state, small_batches=parts)
        small, large = np.mean(np.sum(own**2, 1)), np.sum(own.mean(0) ** 2)
        # b = 2, B = 6, as the paper has it
        seen.append([(small - large) / (1 / 2 - 1 / 6), (6 * large - 2 * small) / (6 - 2)])
    weights = 0.7 ** np.arange(5)[::-1]
    mean = np.average(seen, axis=0, weights=weights)
    spread = np.cov(np.transpose(seen), ddof=0, aweights=weights)
    np.testing.assert_allclose(np.stack([state.noise, state.signal], 1), [mean] * 2, rtol=1e-5)
    np.testing.assert_allclose(state.noise_variance[-1], spread[0, 0], rtol=1e-4)
    np.testing.assert_allclose(state.signal_variance[-1], spread[1, 1], rtol=1e-4)
    np.testing.assert_allclose(state.covariance[-1], spread[0, 1], rtol=1e-4)
    np.testing.assert_allclose(state.weight, weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(state.square_weight, np.sum(weights**2), rtol=1e-6)


def test_micro_batches_of_different_sizes_have_no_bias():
    """Parts of 1, 2 and 5 examples, and one of none; the noise of an example is 4, and 1 is G^2."""
    params = jnp.full(3, 3**-0.5)
    optimizer = lb.accumulate_gradients(lb.gradient_noise_scale(0.999), 4, small_batches=True)
    sizes = jnp.array([2.0, 0.0, 5.0, 1.0])

    def micro(state, given):
        key, size = given
        noise = 2 * 3**-0.5 * jax.random.normal(key, (3,)) / jnp.sqrt(size)
        # of no examples it is NaN
        return optimizer.update(params + noise, state, params, examples=size)[1], None

    def run(key):
        keys = jax.random.split(key, 4 * 100)
        return jax.lax.scan(micro, optimizer.init(params), (keys, jnp.tile(sizes, 100)))[0]

    state = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 100)).inner_state
    np.testing.assert_allclose(state.noise.mean(0), 4, rtol=0.02)
    np.testing.assert_allclose(state.signal.mean(0), 1, rtol=0.03)


def test_a_step_of_one_micro_batch_changes_no_estimate():
    """The schedule has macro-batches of two and of one; a flush makes another one of one."""
    every = lb.values_schedule([2, 1, 3])
    optimizer = lb.accumulate_gradients(lb.gradient_noise_scale(), every, small_batches=True)
    params = jnp.ones(3)
    state, states, step = optimizer.init(params), [], jax.jit(optimizer.update)
    for index in range(4):
        gradient = jnp.arange(3.0) + index
        _, state = step(gradient, state, params, flush=index == 3)
        states.append(state)
    assert [int(state.macro_step) for state in states] == [0, 1, 2, 3]
    averages = [np.stack(state.inner_state[2:]) for state in states]
    assert not averages[0].any()
    assert averages[1].any()
    np.testing.assert_array_equal(averages[1:], [averages[1]] * 3)
    assert np.isfinite(lb.noise_scale(state).noise_scale)


@pytest.mark.parametrize("where", ["the gradient", "its parts"])
def test_a_step_that_is_not_finite_changes_no_estimate(where):
    transform = lb.gradient_noise_scale()
    own = jnp.array([[1.0, 2.0], [3.0, 1.0]])
    mean = own.mean(0)
    parts = lb.small_batches_of_examples(own, own[0], mean=mean)
    _, state = transform.update(mean, transform.init(own[0]), small_batches=parts)
    bad = own.at[0, 0].set(jnp.inf)
    own, mean = (own, bad.mean(0)) if where == "the gradient" else (bad, mean)
    parts = lb.small_batches_of_examples(own, own[0], mean=mean)
    updates, after = transform.update(mean, state, small_batches=parts)
    np.testing.assert_array_equal(updates, mean)
    jax.tree.map(np.testing.assert_array_equal, after, state)


@needs_shard_map
@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_split_over_another_axis(check_vma):
    """Blocks are split, and a stack between its layers; the state is that of one device."""
    specs = {"bias": P(), "kernel": P("tensor"), "layers": P("tensor")}
    optimizer = lb.gradient_noise_scale(stacked=STACKED)
    params = network()
    gradients = jax.tree.map(lambda x: x + 3, examples(jax.random.key(0), 4))

    def state(params, own, parts_of, mean, **extra_args):
        parts = parts_of(own, params, mean=mean(own), stacked=STACKED, **extra_args)
        start = optimizer.init(network())
        return optimizer.update(mean(own), start, params, small_batches=parts)[1]

    def on_mesh(params, gradients):
        return state(
            params,
            jax.tree.map(lambda x: x[0], gradients),
            functools.partial(lb.small_batches_of_devices, axis_name="data"),
            lambda own: jax.lax.pmean(own, "data"),
            partition_specs=specs,
        )

    def on_one_device(params, gradients):
        def mean(own):
            return jax.tree.map(lambda x: x.mean(0), own)

        return state(params, gradients, lb.small_batches_of_examples, mean)

    apart = jax.tree.map(
        lambda spec: P("data", *spec), specs, is_leaf=lambda node: isinstance(node, P)
    )
    run = jax.shard_map(
        on_mesh,
        mesh=mesh("data", "tensor", shape=(4, 2)),
        in_specs=(specs, apart),
        out_specs=P(),
        check_vma=check_vma,
    )
    ours, theirs = (jax.jit(way)(params, gradients) for way in (run, on_one_device))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), ours, theirs)


@needs_shard_map
@pytest.mark.parametrize("check_vma", [True, False])
def test_micro_batches_of_split_parameters(check_vma):
    specs = {"bias": P(), "kernel": P("tensor"), "layers": P("tensor")}
    watch = lb.gradient_noise_scale(stacked=STACKED)
    optimizer = lb.accumulate_gradients(watch, 2, small_batches=True, stacked=STACKED)
    parts = [jax.tree.map(lambda x, i=i: jnp.cos(x + i), network()) for i in range(2)]

    def scale(params, parts, **extra_args):
        state = optimizer.init(params)._replace(inner_state=watch.init(network()))
        none = lb.SmallBatches.none(6)  # of the whole stack
        state = state._replace(small_batches=none)
        for gradients in parts:
            _, state = optimizer.update(gradients, state, params, **extra_args)
        return state.inner_state

    run = jax.shard_map(
        functools.partial(scale, partition_specs=specs),
        mesh=mesh("tensor", shape=(2,)),
        in_specs=(specs, [specs] * 2),
        out_specs=P(),
        check_vma=check_vma,
    )
    ours, expected = (jax.jit(way)(network(), parts) for way in (run, scale))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), ours, expected)


@needs_shard_map
@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_jit_on_a_mesh(kind, told):
    """From examples, and from the same in micro-batches."""
    specs = {"bias": P(), "kernel": P("fsdp"), "layers": P("fsdp")}
    watch = lb.chain(lb.gradient_noise_scale(stacked=STACKED), lb.lamb(0.1, stacked=STACKED))
    accumulating = lb.accumulate_gradients(watch, 2, small_batches=True, stacked=STACKED)
    extra_args = {"partition_specs": specs} if told else {}

    def both(params, gradients, **extra_args):
        mean = jax.tree.map(lambda x: x.mean(0), gradients)
        parts = lb.small_batches_of_examples(
            gradients, params, mean=mean, stacked=STACKED, **extra_args
        )
        _, (one, _) = watch.update(
            mean, watch.init(params), params, small_batches=parts, **extra_args
        )
        state = accumulating.init(params)
        for i in range(2):
            own = jax.tree.map(lambda x, i=i: x[i], gradients)
            _, state = accumulating.update(own, state, params, **extra_args)
        return one, state.inner_state[0]

    gradients = examples(jax.random.key(0), 2)
    expected = jax.jit(both)(network(), gradients)
    devices = jax.make_mesh((2,), ("fsdp",), axis_types=(getattr(AxisType, kind),))
    with jax.set_mesh(devices):
        split = {name: NamedSharding(devices, spec) for name, spec in specs.items()}
        behind = {name: NamedSharding(devices, P(None, *spec)) for name, spec in specs.items()}
        args = jax.device_put(network(), split), jax.device_put(gradients, behind)
        ours = jax.jit(functools.partial(both, **extra_args))(*args)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), jax.device_get(ours), expected
    )


def reductions(function, *args):
    """Their number, as traced; the compiler may combine some."""
    return str(jax.make_jaxpr(function)(*args)).count(" psum")


@needs_shard_map
def test_norms_of_devices_and_of_their_mean_take_one_reduction():
    def parts(gradients, mean):
        own = jax.tree.map(lambda x: x[0], gradients)
        return lb.small_batches_of_devices(own, network(), "data", mean=mean)

    run = jax.shard_map(parts, mesh=mesh("data"), in_specs=(P("data"), P()), out_specs=P())
    gradients = jax.tree.map(lambda x: jnp.ones((PARTS, *x.shape)), network())
    assert reductions(run, gradients, network()) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_changes_no_number_of_the_optimizer_nor_its_place_one_of_its_own(place):
    params, gradients = network(), examples(jax.random.key(0), 2)
    mean = jax.tree.map(lambda x: x.mean(0), gradients)
    parts = lb.small_batches_of_examples(gradients, params, mean=mean)
    links = [lb.lamb(0.1)]
    links.insert(place, WATCH)

    @functools.partial(jax.jit, static_argnums=0)
    def step(transform):
        return transform.update(mean, transform.init(params), params, small_batches=parts)

    updates, states = step(lb.chain(*links))
    expected, state = step(lb.lamb(0.1))
    jax.tree.map(np.testing.assert_array_equal, (updates, states[1 - place]), (expected, state))
    jax.tree.map(np.testing.assert_array_equal, states[place], step(WATCH)[1])


WATCH = lb.gradient_noise_scale()


def one_step(state, key, n):
    """Of two examples each; the steps 0, 3, 6 and so on are measured."""
    own = examples(key, 2)
    mean = jax.tree.map(lambda x: x.mean(0), own)
    parts = lb.small_batches_of_examples(own, network(), mean=mean, when=n % 3 == 0)
    return WATCH.update(mean, state, small_batches=parts)[1]


def one_macro_batch(state, key, n):
    """The same in two micro-batches."""
    optimizer = lb.accumulate_gradients(WATCH, 2, small_batches=3)
    accumulating = optimizer.init(network())._replace(macro_step=n, inner_state=state)
    own = examples(key, 2)
    for i in range(2):
        part = jax.tree.map(lambda x, i=i: x[i], own)
        _, accumulating = optimizer.update(part, accumulating, network())
    return accumulating.inner_state


def on_device(state, own, n):
    """The same on two devices, each with an example."""
    own = jax.tree.map(lambda x: x[0], own)
    mean = jax.lax.pmean(own, "data")
    parts = lb.small_batches_of_devices(own, network(), "data", mean=mean, when=n % 3 == 0)
    return WATCH.update(mean, state, small_batches=parts)[1]


def by_shard_map():
    specs = (P(), P("data"), P())
    devices = mesh("data", shape=(2,))
    run = jax.jit(jax.shard_map(on_device, mesh=devices, in_specs=specs, out_specs=P()))
    return lambda state, key, n: run(state, examples(key, 2), n)


def by_pmap():
    run = jax.pmap(on_device, axis_name="data", in_axes=(None, 0, None), devices=jax.devices()[:2])

    def step(state, key, n):
        own = jax.tree.map(lambda x: x[:, None], examples(key, 2))
        return jax.tree.map(lambda x: x[0], run(state, own, n))

    return step


ONE_STEP = {
    "examples": lambda: jax.jit(one_step),
    "micro-batches": lambda: jax.jit(one_macro_batch),
    "devices": pytest.param(by_shard_map, marks=needs_shard_map),
    "devices of pmap": pytest.param(by_pmap, marks=needs_shard_map),
}


@pytest.mark.parametrize("make", ONE_STEP.values(), ids=ONE_STEP)
def test_only_the_steps_that_are_measured_count(make):
    """Seven steps with every third measured have the averages of those three."""
    keys = jax.random.split(jax.random.key(0), 7)
    step = make()
    state = expected = WATCH.init(network())
    for n, key in enumerate(keys):
        state = step(state, key, jnp.int32(n))
    for key in keys[::3]:
        expected = step(expected, key, jnp.int32(0))
    assert expected.weight > 2
    jax.tree.map(np.testing.assert_array_equal, state, expected)


SHAPE = (48, 40)
"""Of a gradient, that no other array has."""


def passes(optimizer, watched):
    """How many gradients the kernels of a compiled step read always and in branches; and copies.

    The text of a compiled program has a block for each kernel, with its arguments, and the names of
    those that a conditional has for branches.
    """
    param = jnp.ones(SHAPE)

    def step(state, own, mean, n):
        told = {}
        if watched:
            parts = lb.small_batches_of_examples(own, param, mean=mean, when=n % 10 == 0)
            told["small_batches"] = parts
        return optimizer.update(mean, state, param, **told)

    args = jnp.ones((2, *SHAPE)), param, jnp.int32(1)
    step = jax.jit(step, donate_argnums=0).lower(optimizer.init(param), *args)
    text = step.compile().as_text()
    blocks = dict(re.findall(r"^(?:ENTRY )?%?(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    listed = re.findall(r"branch_computations=\{(.*?)\}", text)
    branches = {name.strip(" %") for names in listed for name in names.split(",")}
    shape = rf"f32\[(?:2,)?{','.join(map(str, SHAPE))}\]\S*"

    def read(callers):
        kernels = [k for c in callers for k in re.findall(r"calls=%?([\w.-]+)", blocks[c])]
        return sum(len(re.findall(rf"{shape} parameter\(", blocks[k])) for k in kernels)

    return read(blocks.keys() - branches), read(branches), len(re.findall(rf"{shape} copy\(", text))


NOT_MEASURED = {
    "a step": lambda optimizer, every: optimizer,
    "a micro-batch": lambda optimizer, every: lb.accumulate_gradients(
        optimizer, 2, small_batches=every
    ),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA copies and counts otherwise")
@pytest.mark.parametrize("what", NOT_MEASURED)
def test_what_is_not_measured_reads_no_gradient_more(what):
    """All kernels that are added to those of `lamb` stand in branches, and nothing is copied."""
    wrapped, lamb = NOT_MEASURED[what], lb.lamb(0.1)
    plain = passes(wrapped(lamb, False), watched=False)
    watched = wrapped(lb.chain(lb.gradient_noise_scale(), lamb), 10)
    always, in_branches, copies = passes(watched, watched=what == "a step")
    assert plain[0] > 0
    assert (always, copies) == (plain[0], plain[2])
    assert in_branches >= plain[1] + 2


def test_says_the_three_ways_where_there_are_no_small_batches():
    optimizer, params = lb.chain(lb.gradient_noise_scale(), lb.lamb(0.1)), jnp.ones(3)
    with pytest.raises(ValueError, match="small_batches must be given") as caught:
        optimizer.update(params, optimizer.init(params), params)
    for way in ("accumulate_gradients(", "small_batches_of_devices(", "small_batches_of_examples("):
        assert way in str(caught.value)


ONE = jnp.ones((1, 3))
TWO = jnp.ones((2, 3))
MISTAKES = {
    "one micro-batch": (
        lambda: lb.accumulate_gradients(lb.gradient_noise_scale(), 1, small_batches=True),
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
    "batch size": (
        lambda: lb.small_batches_of_examples(TWO, TWO[0], batch_size=0, mean=TWO[0]),
        r"batch_size must be in \(0, inf\), got 0",
    ),
    "one device": (
        lambda: jax.vmap(
            lambda x: lb.small_batches_of_devices(x, x, "data", mean=x), axis_name="data"
        )(ONE),
        "two devices or more, got 'data' with one",
    ),
    "handed to accumulate_gradients": (
        lambda: lb.accumulate_gradients(lb.gradient_noise_scale(), 2).update(
            ONE[0],
            lb.accumulate_gradients(lb.gradient_noise_scale(), 2).init(ONE[0]),
            small_batches=lb.small_batches_of_examples(TWO, TWO[0], mean=TWO[0]),
        ),
        "must not be given .* small_batches=True",
    ),
    "another number of blocks": (
        lambda: lb.gradient_noise_scale().update(
            ONE[0],
            lb.gradient_noise_scale().init(ONE[0]),
            small_batches=lb.SmallBatches.none(2),
        ),
        "has 2 blocks and gradient_noise_scale 1",
    ),
    "a stack of another length": (
        lambda: lb.accumulate_gradients(optax.sgd(0.1), 2, small_batches=True).update(
            [ONE[0], ONE[0]],
            lb.accumulate_gradients(optax.sgd(0.1), 2)
            .init([ONE[0], ONE[0]])
            ._replace(small_batches=lb.SmallBatches.none(3)),
        ),
        "small_batches has 3 entries and the parameters have 2 blocks",
    ),
    "a state without one": (lambda: lb.noise_scale(optax.EmptyState()), "must hold one noise"),
    "other parameters": (
        lambda: lb.layer_noise_scales(lb.gradient_noise_scale().init(ONE), [ONE, ONE]),
        "noise scales of 1 blocks, and params have 2",
    ),
    "a mean of another shape": (
        lambda: lb.small_batches_of_examples(TWO, TWO[0], mean=TWO),
        "mean must have the shapes of the parameters",
    ),
    "confidence": (
        lambda: lb.noise_scale(lb.gradient_noise_scale().init(ONE), confidence=1.0),
        r"confidence must be in \(0, 1\)",
    ),
    "decay": (lambda: lb.gradient_noise_scale(1.0), r"decay must be in \[0, 1\), got 1.0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("when", [1, jnp.int32(1), jnp.ones(2, bool), None])
def test_when_is_no_condition(when):
    with pytest.raises(TypeError, match="when must be True, False or a boolean scalar array"):
        lb.small_batches_of_examples(TWO, TWO[0], mean=TWO[0], when=when)


@pytest.mark.parametrize("number", [0, -1])
def test_no_number_of_macro_batches(number):
    with pytest.raises(ValueError, match="small_batches must be >= 1"):
        lb.accumulate_gradients(lb.gradient_noise_scale(), 2, small_batches=number)


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
        return lb.small_batches_of_devices(own, jnp.ones(1), "data", mean=mean, when=when)

    run = jax.shard_map(parts, mesh=mesh("data"), in_specs=P("data"), out_specs=P())
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

        return lb.small_batches_of_devices(jax.grad(loss)(params), params, "data", mean=params)

    run = jax.shard_map(parts, mesh=mesh("data"), in_specs=({"w": split}, P("data")), out_specs=P())
    with pytest.raises(ValueError, match=message):
        run({"w": jnp.ones(8)}, jnp.ones(8))


class TestBand:
    def state(self, **changes):
        """After a hundred equal weights: 4 +- 0.5 and 1 +- 0.1, the steps ten times as far."""
        numbers = {
            "weight": 100.0,
            "square_weight": 100.0,
            "noise": 4.0,
            "signal": 1.0,
            "noise_variance": 99 * 0.5**2,
            "signal_variance": 99 * 0.1**2,
            "covariance": 0.0,
        } | changes
        arrays = {
            name: jnp.asarray(x, "float32") if "weight" in name else jnp.full(2, x, "float32")
            for name, x in numbers.items()
        }
        return lb.GradientNoiseScaleState(**arrays)

    def test_is_fiellers(self):
        """At its ends the distance from 0 of `noise - r signal` is z of its standard deviations."""
        band = lb.noise_scale(self.state(covariance=99 * 0.02), confidence=0.9)
        for end in (band.low, band.high):
            variance = 0.5**2 - 2 * end * 0.02 + (end * 0.1) ** 2
            np.testing.assert_allclose((4 - end) ** 2 / variance, 1.6449**2, rtol=1e-3)
        assert band.low < 4 < band.high

    def test_is_open_above_where_the_gradient_is_not_told_from_0(self):
        band = lb.noise_scale(self.state(signal=0.1))
        np.testing.assert_allclose(band.noise_scale, 40)
        assert 0 < band.low < 40
        assert band.high == jnp.inf

    def test_a_gradient_estimated_below_0(self):
        band = lb.noise_scale(self.state(signal=-0.05))
        assert band.noise_scale == band.high == jnp.inf
        assert 0 < band.low < jnp.inf

    def test_begins_at_0_where_the_noise_is_not_told_from_0(self):
        band = lb.noise_scale(self.state(noise=0.5))
        assert band.low == 0
        np.testing.assert_allclose(band.noise_scale, 0.5)
        assert 0.5 < band.high < jnp.inf

    @pytest.mark.parametrize("scale", [1e-15, 1e15])
    def test_neither_overflows_nor_vanishes(self, scale):
        band, expected = (
            lb.noise_scale(
                self.state(
                    noise=4 * scale,
                    signal=scale,
                    noise_variance=99 * (0.5 * scale) ** 2,
                    signal_variance=99 * (0.1 * scale) ** 2,
                )
            )
            for scale in (scale, 1.0)
        )
        np.testing.assert_allclose(band[:3], expected[:3], rtol=1e-4)

    def test_is_unknown_before_the_first_step_and_without_bounds_after_one(self):
        transform = lb.gradient_noise_scale()
        own = jnp.array([[1.0, 2.0], [3.0, 1.0]])
        state = transform.init(own[0])
        assert np.all(np.isnan(jax.tree.leaves(lb.noise_scale(state))))
        parts = lb.small_batches_of_examples(own, own[0], mean=own.mean(0))
        _, state = transform.update(own.mean(0), state, small_batches=parts)
        band = lb.noise_scale(state)
        assert np.isfinite(band.noise_scale)
        assert (band.low, band.high) == (0, jnp.inf)


def test_a_new_state_can_be_donated():
    """No array is there twice."""
    optimizer = lb.accumulate_gradients(lb.gradient_noise_scale(), 2, small_batches=True)
    state = optimizer.init(network())
    arrays = jax.tree.leaves(state)
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
