"""Sums of folds are those over whole blocks, however long these are and however few elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_largebatch.engine.reductions.folds import Fold, sums_of_few

SHAPES = {
    "even": ((64, 32), ()),
    "some elements are left over": ((2003,), ()),
    "one piece": ((144,), ()),
    "a stack": ((4, 16, 32), (0,)),
    "a stack of odd layers": ((3, 701), (0,)),
    "stacked twice": ((2, 3, 51, 7), (0, 1)),
    "one layer": ((1, 2048), (0,)),
}
FEW = SHAPES | {
    "one whole layer": ((64,), ()),
    "one element": ((), ()),
    "short blocks": ((5, 3), (0,)),
    "blocks of one element": ((3, 4), (0, 1)),
    "no element": ((0, 5), ()),
    "no block": ((0, 5), (0,)),
    "empty blocks": ((5, 0), (0,)),
}


def terms(x):
    return [x, jnp.square(x + 1), jnp.sqrt(x)]


def check_sums(sums, x, kept):
    others = tuple(axis for axis in range(x.ndim) if axis not in kept)
    for ours, whole in zip(sums, terms(x), strict=True):
        expected = np.sum(whole, axis=others, keepdims=bool(kept))
        assert ours.shape == expected.shape
        np.testing.assert_allclose(ours, expected, rtol=2e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_those_of_whole_blocks(name):
    shape, kept = SHAPES[name]
    fold = Fold.of(shape, kept)
    assert fold is not None
    x = jax.random.uniform(jax.random.key(0), shape, "float32")
    sums = jax.jit(fold.sums, static_argnums=0)(terms, x)
    check_sums(sums, x, kept)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA merges less")
@pytest.mark.parametrize("size", [2**16, 2**16 + 1], ids=["even", "one is left over"])
def test_nothing_is_kept_of_what_is_added(size):
    fold = Fold.of((size,), ())
    x = jax.ShapeDtypeStruct((size,), "float32")
    program = jax.jit(fold.sums, static_argnums=0).lower(terms, x).compile()
    added = len(terms(jnp.ones(1))) * 4 * size // fold.layers
    assert 0.99 * added <= program.memory_analysis().temp_size_in_bytes < added + 1000
    assert program.as_text().count(" call(") == fold.kernels == (1 if size % 2 == 0 else 2)


@pytest.mark.parametrize("name", FEW)
def test_sums_of_few_are_those_of_whole_blocks(name):
    shape, kept = FEW[name]
    x = jax.random.uniform(jax.random.key(0), shape, "float32")
    sums = jax.jit(lambda x: sums_of_few(terms(x), kept))(x)
    check_sums(sums, x, kept)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA merges less")
@pytest.mark.parametrize("size", [2**11, 2003], ids=["even", "filled up"])
def test_several_sums_of_few_are_two_kernels(size):
    x = jax.ShapeDtypeStruct((size,), "float32")
    program = jax.jit(lambda x: sums_of_few(terms(x), ())).lower(x).compile().as_text()
    entry = program[program.index("ENTRY") :]
    assert entry.count(" fusion(") == 2


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((64, 32), (1,)), ((200, 7), (0,)), ((0, 5), ())],
    ids=["not contiguous", "short blocks", "empty"],
)
def test_what_is_not_folded(shape, kept):
    assert Fold.of(shape, kept) is None


def test_sums_can_be_differentiated():
    """As updates are, by those who learn the parameters of an optimizer."""
    fold = Fold.of((2003,), ())
    x = jnp.linspace(0.1, 1.0, 2003)

    def weighted(x):
        first, second, third = fold.sums(terms, x)
        return first + 2 * second + 3 * third

    expected = 1 + 4 * (x + 1) + 1.5 / jnp.sqrt(x)
    np.testing.assert_allclose(jax.grad(weighted)(x), expected, rtol=1e-5)


@pytest.mark.parametrize("of_few", [False, True])
def test_some_of_the_sums_can_be_differentiated(of_few):
    """Where the others do not depend on it, as the norm of a parameter does not on the gradient."""
    y = jnp.linspace(2.0, 3.0, 2003)

    def second_of_both(x):
        def both(x):
            return [jnp.square(y), x * y]

        sums = sums_of_few(both(x), ()) if of_few else Fold.of((2003,), ()).sums(both, x)
        return sums[1]

    np.testing.assert_allclose(jax.grad(second_of_both)(jnp.ones(2003)), y)
