"""Complex parameters, as of spectral layers: squares are those of sizes, inner products are real.

Numbers come from optax, from NumPy, or from the same optimizer on the pairs of real and imaginary
parts, which is right for whatever asks for norms and inner products alone.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import PerParameter, declare, transformation
from optax_largebatch.testing import check
from tests.helpers import first_step, mesh_of, trained
from tests.optimizers.registry import WRAPPERS

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPES = {"dense": (8, 6), "dense_bias": (6,), "spectral": (8, 6), "spectral_bias": (6,)}
STEPS = 4
RATE = optax.linear_schedule(0.1, 0.0, 10)
KERNELS = ~lb.matching("bias")


def network(shapes=SHAPES, seed=0):
    """Arrays that are complex if they are called spectral, in the precision that is set."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes.items():
        real, imaginary = rng.normal(size=(2, *shape))
        spectral = name.startswith("spectral")
        arrays[name] = jnp.asarray(real + 1j * imaginary if spectral else real)
    return arrays


def gradients_of(params, index):
    return jax.tree.map(lambda x: x * (0.5 + index) + jnp.cos(3 * x.real), params)


def after(optimizer, params=None, **extra_args):
    """Parameters and state after some steps."""
    params = network() if params is None else params
    indices = jnp.arange(float(STEPS))
    run = jax.jit(lambda p: trained(optimizer, p, gradients_of, indices, **extra_args)[0])
    return run(params)


def assert_close(ours, expected, rtol=2e-5):
    for x, y in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        assert x.dtype == y.dtype
        assert np.isfinite(y).all()
        assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(initial=0))


class TestAsOptax:
    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (lb.lamb(RATE), optax.lamb(RATE)),
            (lb.lamb(0.1, 0.8, 0.99, 1e-5, 1e-7, 0.1), optax.lamb(0.1, 0.8, 0.99, 1e-5, 1e-7, 0.1)),
            (lb.lars(RATE, 0.01, denominator="update"), optax.lars(RATE, 0.01)),
            (lb.scale_by_adam(nesterov=True), optax.scale_by_adam(nesterov=True)),
            (lb.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)),
        ],
        ids=["lamb", "lamb, decayed", "lars", "adam", "clip"],
    )
    def test_the_numbers(self, ours, theirs, both_precisions):
        wide = both_precisions
        assert_close(after(ours)[0], after(theirs)[0], rtol=1e-12 if wide else 2e-5)

    @pytest.mark.parametrize("mu_dtype", [None, "bfloat16"])
    def test_dtypes_of_states(self, mu_dtype, both_precisions):
        """There are no complex numbers of 16 bits for each part."""
        bits = 64 if both_precisions else 32
        _, state = after(lb.lamb(RATE, mu_dtype=mu_dtype))
        mu, nu = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
        assert str(mu["spectral"].dtype) == ("complex64" if mu_dtype else f"complex{2 * bits}")
        assert str(mu["dense"].dtype) == (mu_dtype or f"float{bits}")
        assert {str(x.dtype) for x in nu.values()} == {f"float{bits}"}

    def test_a_state_of_optax_is_adopted(self):
        theirs = optax.lamb(RATE)
        params, state = after(theirs)
        adopted = lb.adopt_state(lb.lamb(RATE), params, state, old_optimizer=theirs)
        gradients = gradients_of(params, 9)
        updates, _ = lb.lamb(RATE).update(gradients, adopted, params)
        assert_close(updates, theirs.update(gradients, state, params)[0])

    def test_a_leaf_that_is_read_in_tiles(self):
        shapes = {"spectral": (1024, 1030), "dense": (1024, 1030)}
        params, gradients = network(shapes), network(shapes, seed=1)
        ours, theirs = lb.lamb(0.1), optax.lamb(0.1)
        updates, _ = jax.jit(ours.update)(gradients, ours.init(params), params)
        assert_close(updates, first_step(theirs, gradients, params)[0])


def in_pairs(params):
    """A last axis for real and imaginary parts; of real numbers the second are zeros."""
    return jax.tree.map(lambda x: jnp.stack([x.real, x.imag], -1), params)


NORMS_ALONE = {
    "lars": lambda stacked: lb.lars(RATE, 0.1, nesterov=True, stacked=stacked),
    "larc": lambda stacked: lb.larc(RATE, stacked=stacked),
    "hyperball": lambda stacked: lb.hyperball(RATE, stacked=stacked),
    "hyperball, start": lambda stacked: lb.hyperball(RATE, radius="start", stacked=stacked),
    "block norms": lambda stacked: lb.chain(
        lb.normalize_by_block_norm(stacked=stacked),
        lb.clip_by_global_norm(0.3),
        lb.accumulate_momentum(0.9),
        lb.scale_by_trust_ratio(stacked=stacked),
        lb.scale_by_learning_rate(RATE),
    ),
}


@pytest.mark.parametrize("name", NORMS_ALONE)
def test_norms_are_those_of_pairs_of_real_numbers(name, x64):
    optimizer, params = NORMS_ALONE[name](None), network()
    of_pairs = in_pairs(params)
    state, state_of_pairs = optimizer.init(params), optimizer.init(of_pairs)
    for index in range(STEPS):
        gradients = gradients_of(params, index)
        updates, state = optimizer.update(gradients, state, params)
        ours, state_of_pairs = optimizer.update(in_pairs(gradients), state_of_pairs, of_pairs)
        params = optax.apply_updates(params, updates)
        of_pairs = optax.apply_updates(of_pairs, ours)
    assert_close(in_pairs(params), of_pairs, rtol=1e-10)


def test_a_step_of_lans(x64):
    param, gradient = (network({"spectral": (8, 6)}, seed)["spectral"] for seed in range(2))
    optimizer = lb.lans(0.1, b1=0.8, eps=1e-3, weight_decay=0.01)
    ours, _ = first_step(optimizer, gradient, param)
    w, g = np.asarray(param), np.asarray(gradient) / np.linalg.norm(gradient)
    direction = g / (np.abs(g) + 1e-3) + 0.01 * w
    assert_allclose(
        ours, -0.1 * np.linalg.norm(w) * direction / np.linalg.norm(direction), rtol=1e-10
    )


def polar(matrix):
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


class TestMuon:
    @pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "aol", "schatten"])
    def test_a_step_is_the_unitary_factor(self, preconditioning):
        """Also of a high matrix, and of one in bfloat16, of which there are no complex numbers."""
        optimizer = lb.orthogonalize_momentum(
            ns_coeffs="polar_express",
            ns_steps=12,
            ns_dtype="bfloat16",
            preconditioning=preconditioning,
        )
        matrices = network({"spectral": (8, 6), "spectral_wide": (6, 8), "spectral_same": (8, 6)})
        ours, _ = jax.jit(optimizer.update)(matrices, optimizer.init(matrices))
        for name, matrix in matrices.items():
            rows = np.asarray(matrix)
            if preconditioning == "aol":  # it divides each row, or column, by a number
                gram = rows.conj().T @ rows if len(rows) > 6 else rows @ rows.conj().T
                roots = np.sqrt(np.abs(gram).sum(-1))
                rows = rows / (roots if len(rows) > 6 else roots[:, None])
            assert_allclose(ours[name], polar(rows), rtol=1e-3, atol=1e-3)

    def test_the_dual_norm(self):
        optimizer = lb.orthogonalize_momentum(
            ns_coeffs="polar_express", ns_steps=12, adaptive=True, nesterov=False
        )
        matrix = network()["spectral"]
        ours, _ = first_step(optimizer, matrix, matrix)
        assert_allclose(ours, np.linalg.norm(matrix, "nuc") * polar(matrix), rtol=1e-3, atol=1e-3)


OPTIMIZERS = {
    "lamb": lambda stacked: lb.lamb(RATE, weight_decay=0.1, max_grad_norm=1.0, stacked=stacked),
    "lans": lambda stacked: lb.lans(RATE, weight_decay=0.1, stacked=stacked),
    "adamh": lambda stacked: lb.adamh(RATE, stacked=stacked),
    "muon": lambda stacked: lb.muon(RATE, ns_steps=2, adaptive=True, stacked=stacked),
    "muonh": lambda stacked: lb.muonh(RATE, ns_steps=2, stacked=stacked),
    "normuon": lambda stacked: lb.chain(
        lb.normalize_neurons(stacked=stacked), lb.scale_by_matrix_shape(0.2, stacked=stacked)
    ),
    "eve": lambda stacked: lb.eve(RATE, weight_decay=0.1, stacked=stacked),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPTIMIZERS, *NORMS_ALONE])
def test_the_same_however_it_is_run(name):
    """Small leaves of one shape may be one batch, complex ones and real ones apart."""
    shapes = {"a": (6,), "b": (6,), "spectral": (4, 6), "spectral_a": (6,), "spectral_b": (6,)}
    if name == "normuon":
        shapes = {"spectral": (4, 6), "spectral_a": (4, 6), "dense": (4, 6)}
    check((OPTIMIZERS | NORMS_ALONE)[name], network(shapes))


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
def test_complex_matrices_travel_apart_from_real_ones():
    """Of one shape they would else be one exchange, if the iterations have a dtype."""
    optimizer = lb.orthogonalize_momentum(
        ns_coeffs="polar_express", ns_steps=12, ns_dtype="bfloat16"
    )
    matrices = {name: network()[name] for name in ("dense", "spectral")}
    mesh = mesh_of(data=8)
    specs = dict.fromkeys(matrices, NamedSharding(mesh, P("data")))
    update = jax.jit(lambda g, s: optimizer.update(g, s, partition_specs=specs)[0])
    ours = update(jax.device_put(matrices, specs), optimizer.init(matrices))
    assert ours["dense"].dtype == "float32"
    assert_allclose(ours["spectral"], polar(matrices["spectral"]), rtol=1e-3, atol=1e-3)


REFUSE = {
    "clip_by_value": lb.clip_by_value(1.0),
    "clamp_parameters": lb.clamp_parameters(1.0),
    "centralize_gradients": lb.centralize_gradients(),
    "scale_by_second_moment": lb.scale_by_second_moment(),
    "scale_by_learned_matrices": lb.learned_gradient(RATE),
    "add_decayed_weights": lb.add_decayed_weights(0.1, cautious=True),
    "scale_by_lars": lb.scale_by_lars(clip_gradient=1.0),
    "clip_by_median_norm": lb.scaled_adam(RATE),
    "of_mine": transformation(
        lambda update, at: (update, at.state), state=declare(optax.TraceState, trace=PerParameter())
    ),
}


@pytest.mark.parametrize("name", REFUSE)
def test_what_would_be_wrong_is_refused(name):
    optimizer = REFUSE[name] if name != "of_mine" else lb.chain(REFUSE[name])
    who = "lambda" if name == "of_mine" else name
    with pytest.raises(TypeError, match=f"{who}.* takes no complex numbers, and 'spectral' has"):
        optimizer.init(network())


@pytest.mark.parametrize("name", ["clip_by_value", "clip_by_median_norm"])
def test_the_advice_of_the_error(name):
    """The imaginary part of a real array stays zero, and takes part in nothing."""
    ours, _ = after(optax.contrib.split_real_and_imaginary(REFUSE[name]))
    assert {name: x.dtype for name, x in ours.items()} == {
        name: x.dtype for name, x in network().items()
    }


def test_a_gradient_of_the_other_kind():
    params = network()
    gradients = params | {"spectral": params["spectral"].real}
    says = r"real for real .* 'spectral' has a gradient of dtype floa"
    with pytest.raises(TypeError, match=says):
        first_step(lb.lamb(RATE), gradients, params)


class TestWrappers:
    @pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - {"accumulate_gradients"}))
    def test_the_same_steps(self, name):
        ours, _ = after(WRAPPERS[name](lb.lamb(RATE)))
        assert_close(ours, after(lb.lamb(RATE))[0])

    @pytest.mark.parametrize("small_batches", [False, True])
    def test_the_mean_of_micro_batches(self, small_batches):
        params, gradients = network(), [network(seed=seed) for seed in (1, 2)]
        inner = lb.lamb(RATE)
        if small_batches:
            inner = lb.chain(lb.measure_noise_scale(), inner)
        optimizer = lb.accumulate_gradients(inner, every=2, small_batches=small_batches)
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = jax.jit(optimizer.update)(gradient, state, params)
        mean = jax.tree.map(lambda *x: sum(x) / 2, *gradients)
        assert_close(updates, first_step(lb.lamb(RATE), mean, params)[0])


class TestReaders:
    def test_explain(self):
        text = str(lb.explain(lb.muonh(RATE), network()))
        assert "spectral       8x6    1 of 8x6  muon       sphere" in text

    def test_numbers_of_a_run(self):
        optimizer = lb.lamb(0.1, trust_ratio_mask=KERNELS)
        params, gradients = network(), network(seed=1)
        updates, state = first_step(optimizer, gradients, params)
        metrics = lb.step_metrics(state, params, gradients=gradients, updates=updates)
        norm = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in gradients.values()))
        assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
        ratios = lb.trust_ratios(optimizer, state, params)
        direction = np.asarray(gradients["spectral"] / (np.abs(gradients["spectral"]) + 1e-6))
        expected = np.linalg.norm(params["spectral"]) / np.linalg.norm(direction)
        assert_allclose(ratios["spectral"], expected, rtol=1e-5)
        assert lb.diagnose(optimizer, state, params) == []
